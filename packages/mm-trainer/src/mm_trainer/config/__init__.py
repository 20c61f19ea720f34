"""The configuration: YAML → checked, frozen, resolved for a number of ranks, bound to the plugins it names.

``load_config`` → ``resolve`` → ``bind``. Nothing here imports torch but the plugins that ``bind`` loads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_trainer.config.binding import BoundConfig, DatasetBinding, bind
    from mm_trainer.config.environment import Environment
    from mm_trainer.config.loading import load_config, locate
    from mm_trainer.config.resolving import resolve
    from mm_trainer.config.schema import ResolvedConfig, TrainerConfig, json_schema
    from mm_trainer.config.sections.data import DataConfig, DataLoaderParam, DatasetParam
    from mm_trainer.config.sections.model import ModelConfig, SubModelConfig
    from mm_trainer.config.sections.training import ToolsConfig, TrainingConfig
    from mm_trainer.config.yaml.dump import dump_resolved

_HOME = {
    "BoundConfig": "binding",
    "DataConfig": "sections.data",
    "DataLoaderParam": "sections.data",
    "DatasetBinding": "binding",
    "DatasetParam": "sections.data",
    "Environment": "environment",
    "ModelConfig": "sections.model",
    "ResolvedConfig": "schema",
    "SubModelConfig": "sections.model",
    "ToolsConfig": "sections.training",
    "TrainerConfig": "schema",
    "TrainingConfig": "sections.training",
    "bind": "binding",
    "dump_resolved": "yaml.dump",
    "json_schema": "schema",
    "load_config": "loading",
    "locate": "loading",
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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
