"""The exceptions of mm-trainer.

TrainerError                 anything this package raises on purpose
├── InputError               the user's input is at fault: exit code 2, one message, no traceback
│   ├── ConfigError          a value of the configuration, with file, line and dotted key
│   ├── PluginError          an entry point that is unknown, claimed twice, or fails to import
│   └── DataError            a data set that can't be used
├── BadSample                one sample that can't be used; replaced or fatal, as configured
└── TrainingFault            the run itself went wrong (NaN loss, ranks that disagree)

FieldError (a ValueError)    a field of a section or of a plugin's options; becomes a ConfigError with its line
└── MissingField             a required one isn't there
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TrainerError(Exception):
    """Anything this package raises on purpose."""


class InputError(TrainerError):
    """The user's input is at fault; the message is complete without a traceback."""


class ConfigError(InputError):
    """A value of the configuration is wrong.

    Args:
        message: what is wrong, what was allowed and what was got.
        key: dotted key (``training.lr``), if one is to blame.
        file: the YAML file, filled in by the loader if the raiser doesn't know it.
        line: 1-based line in that file.
    """

    def __init__(self, message: str, *, key: str | None = None, file: str | None = None, line: int | None = None):
        super().__init__(message)
        self.message, self.key, self.file, self.line = message, key, file, line

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


class FieldError(ValueError):
    """A field of a section, or of a plugin's ``Options``, is wrong; raise it in validators that look at several fields.

    Args:
        path: from the object that was checked to the field: names, and positions in lists.
        message: what was expected and what was got, without the field's name.
    """

    def __init__(self, path: str | tuple[str | int, ...], message: str) -> None:
        super().__init__(path, message)
        self.path: tuple[str | int, ...] = (path,) if isinstance(path, str) else path
        self.message = message

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.message}"


class MissingField(FieldError):
    """A required field isn't there."""

    def __init__(self, path: str | tuple[str | int, ...]) -> None:
        super().__init__(path, "is required and missing")


class PluginError(InputError):
    """An entry point that is unknown, claimed by two distributions, or whose target fails to import."""


class DataError(InputError):
    """A data set that can't be used."""


class BadSample(TrainerError):
    """One sample can't be used.

    Args:
        where: the file, and the row of the metadata if there is one.
        reason: why, in a few words.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason

    def __reduce__(self) -> tuple[type[BadSample], tuple[str, str]]:
        return type(self), (self.where, self.reason)  # it crosses from data workers by pickle


class TrainingFault(TrainerError):
    """The run itself went wrong."""


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate most like ``name``, if one is like it at all; case doesn't count."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None
