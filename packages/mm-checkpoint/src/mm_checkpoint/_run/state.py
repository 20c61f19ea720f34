"""A training state as flat names: tensors, plain values, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class FlatState:
    """A nested state, flattened with dots.

    Attributes:
        tensors: by flat name.
        values: everything else, by flat name.
        paths: flat name to the keys that lead to it.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Flatten nested mappings with string keys; anything else is a tensor or one plain value.

    Raises:
        ValueError: two entries have the same flat name.
    """
    import torch

    flat = FlatState()
    for path, value in _walk(state, ()):
        name = ".".join(path)
        if name in flat.paths:
            raise ValueError(f"state: {flat.paths[name]} and {path} have the same flat name {name!r}")
        flat.paths[name] = path
        if isinstance(value, torch.Tensor):
            flat.tensors[name] = value
        else:
            flat.values[name] = value
    return flat


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    # An empty mapping, or one with keys that aren't strings, is a plain value: it has no flat names.
    if isinstance(node, Mapping) and (not path or node) and all(isinstance(key, str) for key in node):
        for key, value in node.items():
            yield from _walk(value, (*path, key))
    else:
        yield path, node


def unflatten(values: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Nest flat entries again."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = paths.get(name) or (name,)
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return nested
