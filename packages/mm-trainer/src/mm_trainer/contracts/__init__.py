"""The contracts between framework and plugins. Imports torch on first use of a class that needs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_trainer.contracts.container import ModelContainer
    from mm_trainer.contracts.dataset import DatasetContext, DatasetFactory, MapDataset
    from mm_trainer.contracts.model import DTYPES, BaseModel, Tokenizer
    from mm_trainer.contracts.pipeline import GenerativePipeline, ModelOutput, NoisedInputs, PerSample
    from mm_trainer.contracts.sampling import Sampler, SampleRequest
    from mm_trainer.contracts.spec import InputSpec, ModelSpec, NoOptions, Options

_HOMES = {
    "BaseModel": "model",
    "DTYPES": "model",
    "DatasetContext": "dataset",
    "DatasetFactory": "dataset",
    "GenerativePipeline": "pipeline",
    "InputSpec": "spec",
    "MapDataset": "dataset",
    "ModelContainer": "container",
    "ModelOutput": "pipeline",
    "ModelSpec": "spec",
    "NoOptions": "spec",
    "NoisedInputs": "pipeline",
    "Options": "spec",
    "PerSample": "pipeline",
    "SampleRequest": "sampling",
    "Sampler": "sampling",
    "Tokenizer": "model",
}

__all__ = [
    "DTYPES",
    "BaseModel",
    "DatasetContext",
    "DatasetFactory",
    "GenerativePipeline",
    "InputSpec",
    "MapDataset",
    "ModelContainer",
    "ModelOutput",
    "ModelSpec",
    "NoOptions",
    "NoisedInputs",
    "Options",
    "PerSample",
    "SampleRequest",
    "Sampler",
    "Tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
