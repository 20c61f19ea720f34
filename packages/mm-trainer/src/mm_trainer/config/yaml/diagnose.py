"""Validation errors of pydantic and of the sections' own checks → `ConfigError` with file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mm_checkpoint.errors import FieldError as SourceFieldError
from mm_parallel.errors import FieldError as PlanFieldError
from mm_trainer.config.schema import section_keys
from mm_trainer.config.sections.fields import EACH, keys_of
from mm_trainer.config.yaml.document import Document, split_key
from mm_trainer.config.yaml.foreign import unknown_key
from mm_trainer.config.yaml.nodes import KeyPath, Node
from mm_trainer.errors import ConfigError, FieldError, MissingField, nearest

T = TypeVar("T")

_SHOWN = 10
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a section of keys",
    "dict_type": "a section of keys",
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "list_type": "a list",
    "model_type": "a section of keys",
    "path_type": "a path",
    "string_type": "text",
    "tuple_type": "a list",
}
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?")
_YAML_11_BOOL = re.compile(r"(?:yes|on|(?P<no>no|off))", re.IGNORECASE)


def validate(
    kind: type[T],
    values: Mapping[str, Any],
    document: Document,
    at: KeyPath,
    *,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> T:
    """Values of the document → an instance of a section or options class, types taken at their word.

    JSON's strict mode is YAML's meaning: a whole number may stand for a number, nothing else is converted.

    Args:
        kind: the class.
        values: plain values.
        document: where they were read.
        at: path of the values in the document.
        beside: other keys that may stand at the same place, for the nearest match.

    Raises:
        ConfigError: every fault found (the first ten), the first one's place in its attributes.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise _Diagnosis(kind, document, at, beside).combine(error) from error


class _Diagnosis:
    """What pydantic found in one class's values, in terms of the document."""

    def __init__(self, kind: type, document: Document, at: KeyPath, beside: Mapping[str, Any]) -> None:
        self._kind, self._document, self._at, self._beside = kind, document, at, beside

    def combine(self, error: ValidationError) -> ConfigError:
        """One error out of all that pydantic found."""
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            by_path.setdefault(self._path(detail), []).append(detail)
        found = [self._explain(path, details) for path, details in by_path.items()]
        return combine_errors(found)

    def _path(self, detail: ErrorDetails) -> KeyPath:
        """KeyPath in the document; pydantic's own location also names branches of unions."""
        _, node = self._document.at(self._at)
        path: list[str | int] = []
        for part in detail["loc"]:
            below = node.child(part)
            if below is not None:
                path.append(part)
                node = below
            elif detail["type"] == "missing" and part == detail["loc"][-1]:
                path.append(part)
        return (*self._at, *path)

    def _explain(self, path: KeyPath, details: list[ErrorDetails]) -> ConfigError:
        kinds = {detail["type"] for detail in details}
        first = details[0]
        if kinds & {"extra_forbidden", "unexpected_keyword_argument"}:
            return self._document.error(unknown_key(str(path[-1]), list(self._siblings(path)), section_keys()), path)
        if first["type"] == "missing":
            return missing(self._document, path, self._siblings(path))
        if first["type"] == "value_error":
            return from_value_error(self._document, first["ctx"]["error"], path)
        expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
        _, node = self._document.at(path)
        return self._document.error(f"expected {expected}, got {_got(node, details)}", path)

    def _siblings(self, path: KeyPath) -> Mapping[str, Any]:
        """Keys that the class declares alongside the last one of ``path``."""
        level: dict[str, Any] = {**self._beside, **keys_of(self._kind)}
        for part in path[len(self._at) : -1]:
            level = dict(keys_of(level.get(str(part), level.get(EACH))))
        return level


def combine_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """The first error, the others listed below its message."""
    first, others = errors[0], errors[1:]
    if not others:
        return first
    listed = [str(error) for error in others[: _SHOWN - 1]]
    if len(others) >= _SHOWN:
        listed.append(f"and {len(others) - _SHOWN + 1} more")
    return ConfigError("\n".join([first.message, *listed]), key=first.key, file=first.file, line=first.line)


def from_value_error(document: Document, error: ValueError, at: KeyPath) -> ConfigError:
    """An error of a section's own check; one that knows its field is put there, any other to the section.

    Args:
        at: path of the object that was checked.
    """
    if isinstance(error, PlanFieldError):
        return combine_errors([_at_field(document, fault, at) for fault in (error, *error.also)])
    if isinstance(error, FieldError | SourceFieldError):
        return _at_field(document, error, at)
    return document.error(str(error), at)


def _at_field(document: Document, fault: FieldError | PlanFieldError | SourceFieldError, at: KeyPath) -> ConfigError:
    path = (*at, *fault.path)
    if isinstance(fault, MissingField):
        return missing(document, path, ())
    return document.error(fault.message, path)


def missing(document: Document, path: KeyPath, siblings: Collection[str]) -> ConfigError:
    """A required key that isn't there, or is there misspelt.

    Args:
        siblings: keys that are right at that place.
    """
    *parents, name = path
    _, node = document.at(tuple(parents))
    strangers = set(node.value or ()) - set(siblings) if isinstance(node.value, dict) else set()
    misspelt = nearest(str(name), strangers)
    if misspelt is None:
        return document.error(MissingField(path).message, path)
    return document.error(f"unknown key; did you mean {name}, which is required and missing?", (*parents, misspelt))


def _expected(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    match detail["type"]:
        case "literal_error":
            return ", ".join(_words(detail))
        case "greater_than":
            return f"a number above {context['gt']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than":
            return f"a number below {context['lt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "too_short":
            return f"at least {context['min_length']} entries" if context["min_length"] > 1 else "at least one entry"
        case "too_long":
            return f"at most {context['max_length']} entries"
    return _EXPECTED.get(detail["type"], detail["msg"])


def _got(node: Node, details: list[ErrorDetails]) -> str:
    value, text = node.value, node.text
    if isinstance(value, dict):
        return f"a section with the keys {', '.join(value)}" if value else "an empty section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    kind = {bool: "true/false", int: "a whole number", float: "a number", str: "text"}[type(value)]
    return f"{text!r} ({kind}){_hint(node, details)}"


def _hint(node: Node, details: list[ErrorDetails]) -> str:
    """How to write what was probably meant."""
    text, kinds = node.text, {detail["type"] for detail in details}
    numbers = {"int_type", "int_from_float", "float_type", "int_parsing"}
    if isinstance(node.value, float) and kinds & numbers and node.value.is_integer():
        return f"; write {int(node.value)}"
    if not isinstance(node.value, str):
        return ""
    if kinds & numbers and _NUMBER.fullmatch(text):
        return "; remove the quotes" if node.quoted else f"; write {text.lstrip('0') or '0'}, without the leading zero"
    if "bool_type" in kinds and (match := _YAML_11_BOOL.fullmatch(text)):
        return f"; write {'false' if match['no'] else 'true'}"
    allowed = [word for d in details if d["type"] == "literal_error" for word in _words(d)]
    close = nearest(text, allowed)
    return f"; did you mean {close}?" if close else ""


def _words(detail: ErrorDetails) -> list[str]:
    """The values of a `Literal`, which pydantic hands over in quotes."""
    return re.findall(r"'([^']*)'", detail["ctx"]["expected"])


def located(document: Document, error: ConfigError) -> ConfigError:
    """The same error with file and line of its key filled in, where it doesn't know them."""
    if error.key is None or error.file is not None:
        return error
    key = error.key
    if "models" not in document.plain().get("model", {}):
        key = key.replace("model.models.model", "model", 1)  # a single model has the keys of a sub-model itself
    return document.error(error.message, split_key(key))
