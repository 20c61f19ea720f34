"""Building blocks of the section classes: strict base class, paths, and a walk over a class's keys."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel as PydanticModel
from pydantic import BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

EACH = "*"
"""Stands for any key of a mapping or position of a list in a dotted key."""


class Section(PydanticModel):
    """Base of the classes here: an unknown key is refused, nothing is assigned to later."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class OpenSection(Section):
    """A section in which a plugin has keys of its own: they are kept, and validated when the plugin is known."""

    model_config = ConfigDict(extra="allow")

    @property
    def extras(self) -> dict[str, Any]:
        """The keys that this class doesn't declare."""
        return dict(self.__pydantic_extra__ or {})


def _refuse_url(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        raise PydanticCustomError("remote_path", "a local path (remote locations can't be used for now)")
    return value


LocalPath = Annotated[Path, BeforeValidator(_refuse_url)]


def absolute(path: str | Path, base: str) -> str:
    """``path`` counted from ``base``, without ``..`` in it; one that starts with an undefined variable stays."""
    if str(path).startswith("$"):
        return str(path)
    return os.path.normpath(os.path.join(base, path))


def absolute_paths(value: Any, base: str) -> Any:
    """Copy of a section in which every `Path`, at any depth, is absolute."""
    if isinstance(value, Path):
        return Path(absolute(value, base))
    if isinstance(value, PydanticModel):
        before = {name: getattr(value, name) for name in (*type(value).model_fields, *(value.__pydantic_extra__ or {}))}
        after = {name: absolute_paths(item, base) for name, item in before.items()}
        return value.model_copy(update={name: item for name, item in after.items() if item != before[name]})
    if isinstance(value, dict):
        return {key: absolute_paths(item, base) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(absolute_paths(item, base) for item in value)
    return value


def keys_of(annotation: Any) -> Mapping[str, Any]:
    """Key → type of what may stand under a field of this type; `EACH` for free keys and list positions."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return keys_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return {key: kind for member in get_args(annotation) for key, kind in keys_of(member).items()}
    if origin is dict:
        return {EACH: get_args(annotation)[1]}
    if origin in (list, tuple):
        return {EACH: get_args(annotation)[0]}
    if isinstance(annotation, type) and issubclass(annotation, PydanticModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if isinstance(annotation, type) and is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return {name: hints[name] for name in annotation.__dataclass_fields__}
    return {}


def all_keys(annotation: Any, prefix: str = "") -> list[str]:
    """Every dotted key below a type, `EACH` included."""
    found = []
    for name, kind in keys_of(annotation).items():
        found.append(f"{prefix}{name}")
        found += all_keys(kind, f"{prefix}{name}.")
    return found
