"""Faults of a configuration that carry their place; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

FieldPath = tuple[str | int, ...]
"""Attribute names, dictionary keys and list positions, from a configuration object down to one of its values."""


class FieldError(ValueError):
    """A field of a configuration object is wrong.

    Args:
        where: the field in words, which begins the message; empty if the message says it all.
        message: what was expected and what was got.
        path: from the object that was checked, or passed in, to the field. A caller that composes configurations finds
            the place by this path, never by the words.
        also: further faults that the same check found.
    """

    def __init__(self, where: str, message: str, *, path: FieldPath = (), also: Sequence[FieldError] = ()) -> None:
        self.where, self.message, self.path, self.also = where, message, path, tuple(also)
        super().__init__(where, message)

    def __str__(self) -> str:
        own = f"{self.where}: {self.message}" if self.where else self.message
        return "\n".join([own, *map(str, self.also)])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.message), {"path": self.path, "also": self.also}


class PatternError(FieldError):
    """A pattern that can't be read, or that matches no module; its path is its position in the list of patterns."""


class PlanError(FieldError):
    """A plan that contradicts itself or the model."""


@contextmanager
def below(*outer: str | int) -> Iterator[None]:
    """Let the paths of the block's errors begin ``outer`` levels higher."""
    try:
        yield
    except FieldError as error:
        for fault in (error, *error.also):
            fault.path = (*outer, *fault.path)
        raise
