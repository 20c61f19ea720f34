"""What a weight folder says about a Wan model beyond its shapes: which expert it is, where the experts meet."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mm_models_wan.architecture import ARCHITECTURES
from mm_trainer.contracts import ModelSpec

Expert = Literal["high", "low"]

BOUNDARIES = {"T2V-A14B": 0.875, "I2V-A14B": 0.9}
"""σ at which the high-noise expert takes over, for the released models."""

_FOLDER_EXPERTS: dict[str, Expert] = {
    "transformer": "high",
    "transformer_2": "low",
    "high_noise_model": "high",
    "low_noise_model": "low",
}


@dataclass(frozen=True)
class WanRelease:
    """Facts that a transformer's own weights don't hold."""

    boundary: float | None = None
    """σ from which the high-noise expert works; None for a single model, or if it isn't known."""
    expert: Expert | None = None
    """Which of two experts the weights are, as far as their folder's name tells."""
    per_token_timesteps: bool = False
    """Made for a clean first latent frame with timestep 0 (TI2V-5B)."""
    weights: str = "no weight folder"
    """Where the weights are, for messages."""


def read_release(spec: ModelSpec) -> WanRelease:
    """Look beside the weights: ``model_index.json`` of a diffusers pipeline, or the folder names of the original
    release; failing these, the name of the architecture."""
    named = spec.architecture if isinstance(spec.architecture, str) else None
    boundary, per_token = BOUNDARIES.get(named or ""), named == "TI2V-5B"
    place = spec.source.checkpoint_path or spec.source.from_pretrained
    if place is None:
        return WanRelease(boundary, None, per_token)
    folder = Path(place)
    index = folder.parent / "model_index.json"
    if index.is_file():
        stated = json.loads(index.read_text())
        boundary = stated.get("boundary_ratio")
        per_token = bool(stated.get("expand_timesteps", False))
    expert = _FOLDER_EXPERTS.get(folder.name) if boundary is not None or folder.name.endswith("noise_model") else None
    return WanRelease(boundary, expert, per_token, weights=str(folder))


def boundary_by_channels(in_channels: int) -> float | None:
    """The released boundary of an A14B model with this many input channels."""
    for name, boundary in BOUNDARIES.items():
        if ARCHITECTURES[name]["in_channels"] == in_channels:
            return boundary
    return None
