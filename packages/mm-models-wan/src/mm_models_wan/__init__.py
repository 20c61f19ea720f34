"""Wan2.2 for mm-trainer: diffusion transformer, VAE and text-encoder wrappers, pipelines, key maps, recipes.

Importing this package imports no torch: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "SampleRequest": "sampling",
    "UMT5TextEncoder": "modules.text_encoder",
    "WAN2_2": "weights.key_map",
    "Wan22Container": "container",
    "Wan22Options": "options",
    "WanArchitecture": "weights.architecture",
    "WanPipeline": "pipeline",
    "WanPredictor": "modules.predictor",
    "WanSampler": "sampling",
    "WanSchedulerOptions": "schedule",
    "WanVideoVAE": "modules.vae",
    "build_schedule": "schedule",
    "write_tiny_pipeline": "tiny",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
