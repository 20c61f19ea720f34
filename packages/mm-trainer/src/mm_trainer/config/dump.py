"""A configuration as YAML again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel as PydanticModel

from mm_trainer.config.model import ModelConfig, SubModelConfig
from mm_trainer.config.schema import TrainerConfig
from mm_trainer.config.yaml_nodes import Dumper


def dump_resolved(config: TrainerConfig) -> str:
    """Every key with its value, defaults included, paths absolute; `load_config` accepts it as it is."""
    values = plain_values(config.sections())
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def plain_values(value: Any) -> Any:
    """Sections, paths and tuples → what YAML knows; a dollar sign is written so that it is read as one."""
    if isinstance(value, PydanticModel):
        names = [*type(value).model_fields, *(value.__pydantic_extra__ or {})]
        if isinstance(value, ModelConfig) and value.models is not None:
            names = [name for name in names if name == "model_id" or name not in SubModelConfig.model_fields]
        return {name: plain_values(getattr(value, name)) for name in names}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_values(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, str | Path):
        text = str(value)
        return text if text.startswith("${") else text.replace("$", "$$")
    return value
