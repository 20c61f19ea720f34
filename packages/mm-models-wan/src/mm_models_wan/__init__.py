"""Wan2.2 for mm-trainer: diffusion transformer, VAE and text-encoder wrappers, pipelines, key maps, recipes.

Importing this package imports no torch: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_models_wan.container import Wan22Container
    from mm_models_wan.modules.predictor import WanPredictor
    from mm_models_wan.modules.text_encoder import UMT5TextEncoder
    from mm_models_wan.modules.vae import WanVideoVAE
    from mm_models_wan.options import Wan22Options
    from mm_models_wan.pipeline import WanPipeline
    from mm_models_wan.sampling import SampleRequest, WanSampler
    from mm_models_wan.schedule import WanSchedulerOptions, build_schedule
    from mm_models_wan.tiny import write_tiny_pipeline
    from mm_models_wan.weights.architecture import WanArchitecture
    from mm_models_wan.weights.key_map import WAN2_2

_HOME = {
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

__all__ = [
    "SampleRequest",
    "UMT5TextEncoder",
    "WAN2_2",
    "Wan22Container",
    "Wan22Options",
    "WanArchitecture",
    "WanPipeline",
    "WanPredictor",
    "WanSampler",
    "WanSchedulerOptions",
    "WanVideoVAE",
    "build_schedule",
    "write_tiny_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
