"""The configuration: YAML → checked, frozen, resolved for a number of ranks, bound to the plugins it names.

``load_config`` → ``resolve`` → ``bind``. Nothing here imports torch but the plugins that ``bind`` loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_trainer.config.binding import BoundConfig, DatasetBinding, bind
    from mm_trainer.config.data import DataConfig, DataLoaderParam, DatasetParam
    from mm_trainer.config.dump import dump_resolved
    from mm_trainer.config.environment import Environment, RankEnvironment
    from mm_trainer.config.loader import load_config, locate
    from mm_trainer.config.model import ModelConfig, SubModelConfig
    from mm_trainer.config.resolving import resolve
    from mm_trainer.config.schema import ResolvedConfig, TrainerConfig, json_schema
    from mm_trainer.config.training import ToolsConfig, TrainingConfig

_HOMES = {
    "BoundConfig": "binding",
    "DataConfig": "data",
    "DataLoaderParam": "data",
    "DatasetBinding": "binding",
    "DatasetParam": "data",
    "Environment": "environment",
    "ModelConfig": "model",
    "RankEnvironment": "environment",
    "ResolvedConfig": "schema",
    "SubModelConfig": "model",
    "ToolsConfig": "training",
    "TrainerConfig": "schema",
    "TrainingConfig": "training",
    "bind": "binding",
    "dump_resolved": "dump",
    "json_schema": "schema",
    "load_config": "loader",
    "locate": "loader",
    "resolve": "resolving",
}

__all__ = [
    "BoundConfig",
    "DataConfig",
    "DataLoaderParam",
    "DatasetBinding",
    "DatasetParam",
    "Environment",
    "ModelConfig",
    "RankEnvironment",
    "ResolvedConfig",
    "SubModelConfig",
    "ToolsConfig",
    "TrainerConfig",
    "TrainingConfig",
    "bind",
    "dump_resolved",
    "json_schema",
    "load_config",
    "locate",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
