"""What a weight folder says about a Wan model beyond its shapes: which expert it is, where the experts meet."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mm_models_wan.weights.architecture import ARCHITECTURES
from mm_trainer.contracts import ModelSpec
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.schedule import NoiseRange

Expert = Literal["high", "low"]
EXPERTS: tuple[Expert, Expert] = ("high", "low")

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
    weights: str = "the transformer"
    """What the weights are, for messages: their folder, or a named architecture."""


def read_release(spec: ModelSpec) -> WanRelease:
    """Look next to the weights: ``model_index.json`` of a diffusers pipeline, or the folder names of the original
    release; failing these, the name of the architecture.

    Raises:
        ConfigError: a ``model_index.json`` that isn't JSON.
    """
    named = spec.architecture if isinstance(spec.architecture, str) else None
    boundary, per_token = BOUNDARIES.get(named or ""), named == "TI2V-5B"
    places = [Path(place) for place in (spec.source.checkpoint_path, spec.source.from_pretrained) if place]
    if not places:
        return WanRelease(boundary, None, per_token, weights=f"architecture {named}" if named else "the transformer")
    # A checkpoint_path may be a conversion cache, which has no pipeline around it.
    folder = next((place for place in places if _index(place).is_file()), places[0])
    if _index(folder).is_file():
        try:
            stated = json.loads(_index(folder).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{_index(folder)} is not JSON: {error}", key=f"model.models.{spec.name}") from error
        boundary = stated.get("boundary_ratio")
        per_token = bool(stated.get("expand_timesteps", False))
    expert = _FOLDER_EXPERTS.get(folder.name) if boundary is not None or folder.name.endswith("noise_model") else None
    return WanRelease(boundary, expert, per_token, weights=str(folder))


def _index(folder: Path) -> Path:
    return folder.parent / "model_index.json"


def expert_of(noise_range: NoiseRange, release: WanRelease, in_channels: int) -> Expert | None:
    """Which expert a transformer trained on these σ is; None: the only transformer of a model without experts."""
    lo, hi = noise_range
    boundary = release.boundary or boundary_by_channels(in_channels)
    if boundary is None:
        return None
    if lo >= boundary or hi <= boundary:
        return "high" if lo >= boundary else "low"
    if release.expert is not None:  # on both sides of the boundary: still what it was
        return release.expert
    return "low" if lo == 0 and hi < 1 else "high"


def boundary_by_channels(in_channels: int) -> float | None:
    """The released boundary of an A14B model with this many input channels."""
    for name, boundary in BOUNDARIES.items():
        if ARCHITECTURES[name]["in_channels"] == in_channels:
            return boundary
    return None
