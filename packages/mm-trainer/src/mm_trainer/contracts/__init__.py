"""The contracts between framework and plugins. Imports torch on first use of a class that needs it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_trainer.contracts.alternation import Alternation
    from mm_trainer.contracts.clips import ClipFiles, ClipProcessor
    from mm_trainer.contracts.container import ModelContainer
    from mm_trainer.contracts.dataset import DatasetContext, DatasetFactory, MapDataset
    from mm_trainer.contracts.model import DTYPES, BaseModel, Tokenizer
    from mm_trainer.contracts.optimizer import OptimizerFactory, OptimizerRequest, ShardedOptimizer
    from mm_trainer.contracts.pipeline import (
        GenerativePipeline,
        ModelOutput,
        NoisedInputs,
        PerSample,
        PreparesConditions,
        component,
    )
    from mm_trainer.contracts.sampling import Sampler, SampleRequest
    from mm_trainer.contracts.spec import InputSpec, ModelSpec, NoOptions, Options
    from mm_trainer.contracts.step import StepContext

_HOME = {
    "Alternation": "alternation",
    "BaseModel": "model",
    "ClipFiles": "clips",
    "ClipProcessor": "clips",
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
    "OptimizerFactory": "optimizer",
    "OptimizerRequest": "optimizer",
    "Options": "spec",
    "PerSample": "pipeline",
    "PreparesConditions": "pipeline",
    "SampleRequest": "sampling",
    "Sampler": "sampling",
    "ShardedOptimizer": "optimizer",
    "StepContext": "step",
    "Tokenizer": "model",
    "component": "pipeline",
}

__all__ = [
    "Alternation",
    "BaseModel",
    "ClipFiles",
    "ClipProcessor",
    "DTYPES",
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
    "OptimizerFactory",
    "OptimizerRequest",
    "Options",
    "PerSample",
    "PreparesConditions",
    "SampleRequest",
    "Sampler",
    "ShardedOptimizer",
    "StepContext",
    "Tokenizer",
    "component",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
