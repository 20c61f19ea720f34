"""File or recipe + overrides + environment → `TrainerConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mm_trainer import registry
from mm_trainer.config.environment import Environment
from mm_trainer.config.schema import Sections, TrainerConfig
from mm_trainer.config.sections.fields import absolute, absolute_paths
from mm_trainer.config.sections.model import ModelConfig, SubModelConfig
from mm_trainer.config.sections.training import ToolsConfig, TrainingConfig
from mm_trainer.config.yaml.diagnose import located, validate
from mm_trainer.config.yaml.document import read_document
from mm_trainer.errors import ConfigError

S = TypeVar("S", bound=SubModelConfig)

_WEIGHT_PATHS = (
    "from_pretrained",
    "checkpoint_path",
    "checkpoint_conversion_dir",
    "dcp_cache_dir",
    "dcp_conversion_dir",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_config(
    reference: str, overrides: Sequence[str] = (), *, environment: Environment | None = None
) -> TrainerConfig:
    """Read a configuration; imports no torch and no plugin.

    Args:
        reference: a YAML file, or ``recipe:NAME``.
        overrides: ``dotted.key=value`` with the value in YAML; they come last.
        environment: of variables in values, and the base of relative paths; by default this process's, now.

    Raises:
        ConfigError: with file, line and key of every fault.
        PluginError: no such recipe.
    """
    environment = environment or Environment.read()
    document = read_document(reference, overrides, environment, registry.read_recipe)
    sections = validate(Sections, document.plain(), document, ())
    base = environment.cwd
    training = absolute_paths(sections.training, base)
    return TrainerConfig(
        parallel=sections.parallel,
        model=_with_absolute_sources(sections.model, base),
        data=absolute_paths(sections.data, base),
        training=training,
        tools=_with_folders(absolute_paths(sections.tools, base), training),
        features=sections.features,
        document=document,
    )


def locate(config: TrainerConfig, error: ConfigError) -> ConfigError:
    """``error`` with the file and line of its key, for errors raised where only the key is known."""
    return located(config.document, error)


def _with_folders(tools: ToolsConfig, training: TrainingConfig) -> ToolsConfig:
    """Recordings go into the run's folder unless the configuration says otherwise."""
    folders = {"profile": "profiling", "memory_profile": "memory"}
    windows = {name: getattr(tools, name) for name in folders}
    return tools.model_copy(
        update={
            name: window.model_copy(update={"save_path": window.save_path or training.save / folders[name]})
            for name, window in windows.items()
        }
    )


def _with_absolute_sources(model: ModelConfig, base: str) -> ModelConfig:
    if model.models is None:
        return _absolute_source(model, base)
    models = {name: _absolute_source(sub, base) for name, sub in model.models.items()}
    return model.model_copy(update={"models": models})


def _absolute_source(sub: S, base: str) -> S:
    paths: Mapping[str, Any] = {name: getattr(sub, name) for name in _WEIGHT_PATHS}
    return sub.model_copy(update={name: absolute_source(text, base) for name, text in paths.items() if text})


def absolute_source(text: str, base: str) -> str:
    """A weight source as an absolute path, unless it can only be a hub id or a URL."""
    path = absolute(text, base)
    if "://" in text or (_HUB_ID.fullmatch(text) and not os.path.exists(path)):
        return text
    return path
