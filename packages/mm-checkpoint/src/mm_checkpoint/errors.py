"""Every error this package raises on purpose.

CheckpointError
├── BadInputError                 what the caller named can't be used; the command line exits with 2
│   ├── SourceError               a weight source is missing, ambiguous or of no known format
│   ├── WeightMismatchError       the names or shapes of a file and a module (or state) differ
│   ├── KeyMapError               a key that no rule covers, two that collide, an unknown map
│   ├── CorruptFileError          truncated, altered or inconsistent bytes; a pickle that asks for code
│   ├── IncompleteCheckpointError no complete checkpoint where one was asked for, or several
│   └── DestinationError          the place to write to is taken, foreign or not shared by all ranks
└── SaveError                     writing failed (disk full, permissions); what existed before is intact

FieldError                        a configuration object was given a value that it can't have (a ValueError)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CheckpointError(Exception):
    """Root of the tree; the message is written for people and says all there is to say."""


class BadInputError(CheckpointError):
    """The input is at fault, not the program."""


class FieldError(ValueError):
    """A field of a configuration object is wrong.

    Args:
        path: from the object that was checked to the field.
        message: what was expected and what was got.
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(path, message)
        self.path, self.message = path, message

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.message}"


class SourceError(BadInputError):
    """A weight source is missing, ambiguous or of no known format."""


class WeightMismatchError(BadInputError):
    """The names or shapes of a file and of a module (or state) differ."""


class KeyMapError(BadInputError):
    """A key that no rule covers, two keys that collide, or an unknown key map."""


class CorruptFileError(BadInputError):
    """Truncated, altered or inconsistent bytes, or a pickle that asks for code to run."""


class IncompleteCheckpointError(BadInputError):
    """No complete checkpoint where one was asked for, or several where one was meant."""


class DestinationError(BadInputError):
    """The place to write to is taken, belongs to another run or is not shared by all ranks."""


class SaveError(CheckpointError):
    """Writing failed; whatever was complete before still is."""


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The ``count`` candidates most like ``name``, best first (for error messages)."""
    return difflib.get_close_matches(name, list(candidates), n=count, cutoff=0.4)


def sample(names: Iterable[str], limit: int = 5) -> str:
    """``a, b, c and 7 more``: enough names to recognise the problem, never thousands."""
    listed = sorted(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
