"""A configuration as YAML again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel as PydanticModel

from mm_trainer.config.schema import TrainerConfig
from mm_trainer.config.sections.model import SINGLE_MODEL_KEYS, ModelConfig
from mm_trainer.config.yaml.nodes import Dumper


def dump_resolved(config: TrainerConfig) -> str:
    """Every key with its value, defaults included, paths absolute; `load_config` accepts it unchanged.

    A key that is null unless it is given is left out where it isn't.
    """
    values = plain_values(config.sections())
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def plain_values(value: Any) -> Any:
    """Sections, paths and tuples → what YAML knows; a dollar sign is written so that it is read as one."""
    if isinstance(value, PydanticModel):
        return plain_values(_written(value))
    if is_dataclass(value) and not isinstance(value, type):
        return plain_values(
            {
                field.name: getattr(value, field.name)
                for field in fields(value)
                if not (field.default is None and getattr(value, field.name) is None)
            }
        )
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, str | Path):
        text = str(value)
        return text if text.startswith("${") else text.replace("$", "$$")
    return value


def _written(section: PydanticModel) -> dict[str, Any]:
    """Keys of a section that are worth writing; a container has none of a single model's."""
    declared = type(section).model_fields
    values = {name: getattr(section, name) for name in (*declared, *(section.__pydantic_extra__ or {}))}
    unset = {name for name, field in declared.items() if field.default is None and values[name] is None}
    if isinstance(section, ModelConfig) and section.models is not None:
        unset |= SINGLE_MODEL_KEYS
    return {name: value for name, value in values.items() if name not in unset}
