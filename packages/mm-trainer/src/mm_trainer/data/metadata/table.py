"""The table that says which clips there are: one row per sample, in compact columns.

Column names in use elsewhere are accepted (`ALIASES`). Numbers are optional; a number that isn't stated is NaN. Text is
UTF-8, with or without a byte order mark, whatever the locale. The formats are in `mm_trainer.data.metadata.formats`.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.metadata.columns import StringColumn
from mm_trainer.errors import DataError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "media": (
        *("video", "video_path", "path", "file_path", "file_name", "media_path"),
        *("image", "image_path"),
    ),
    "caption": ("caption", "prompt", "cap", "text"),
    "width": ("width",),
    "height": ("height",),
    "num_frames": ("num_frames",),
    "fps": ("fps",),
    "first_frame": ("first_frame",),
}
"""Our name → the names it goes by, in the order of preference; further columns of paths go by their own name."""

NUMBER_COLUMNS = ("width", "height", "num_frames", "fps", "first_frame")
LIST_SEPARATOR = "\0"
"""Between the texts of a cell that holds several (captions, reference images); refused in text."""
LARGEST = 2**31
"""Beyond it no number of a clip can be meant."""
ABSENT = object()
"""A row of a JSON file lacks this key."""


@dataclass(frozen=True)
class Table:
    """Rows of metadata; row i of every column belongs to sample i."""

    files: tuple[Path, ...]
    """The files that the rows come from."""
    starts: NDArray[np.int64]
    """The first row of each file."""
    line: NDArray[np.int64]
    """1-based line that the row ends on (the row's number for formats without lines)."""
    names: Mapping[str, str]
    """Our column name → the file's."""
    numbers: Mapping[str, NDArray[np.float64]]
    """``width``, ``height``, ``num_frames``, ``fps``, ``first_frame``: whichever the file has."""
    texts: Mapping[str, StringColumn]
    """``media`` and whichever of ``caption`` and the further columns of paths the file has."""

    def __len__(self) -> int:
        return len(self.texts["media"])

    def where(self, row: int, column: str = "media") -> str:
        """``file:line: column``, for messages about one row."""
        file = self.files[int(np.searchsorted(self.starts, row, side="right")) - 1]
        return f"{file}:{int(self.line[row])}: {self.names.get(column, column)}"

    def media(self, row: int) -> str:
        """Path of the clip or image, as written; relative ones count from the data folder."""
        return self.texts["media"].path(row)

    def captions(self, row: int) -> list[str]:
        """All captions of a row; at least one, possibly empty."""
        column = self.texts.get("caption")
        return [""] if column is None else column[row].split(LIST_SEPARATOR)

    def paths(self, column: str, row: int) -> list[str]:
        """Paths in one of the further columns; none if the row has none."""
        values = self.texts.get(column)
        return [] if values is None else [path for path in values.path(row).split(LIST_SEPARATOR) if path]

    def number(self, column: str, row: int) -> float:
        """A number of a row, NaN if it isn't stated."""
        values = self.numbers.get(column)
        return math.nan if values is None else float(values[row])


def join_tables(tables: Sequence[Table]) -> Table:
    """Rows of several files as one table; a column that one of them lacks is empty there."""
    lengths = [len(table) for table in tables]
    offsets = np.cumsum([0, *lengths[:-1]])
    numbers = {name for table in tables for name in table.numbers}
    texts = dict.fromkeys(name for table in tables for name in table.texts)
    return Table(
        files=tuple(file for table in tables for file in table.files),
        starts=np.concatenate([table.starts + offset for table, offset in zip(tables, offsets, strict=True)]),
        line=np.concatenate([table.line for table in tables]),
        names={ours: theirs for table in tables for ours, theirs in table.names.items()},
        numbers={
            name: np.concatenate([table.numbers.get(name, np.full(len(table), np.nan)) for table in tables])
            for name in NUMBER_COLUMNS
            if name in numbers
        },
        texts={
            name: StringColumn.join([table.texts.get(name, StringColumn.empty(len(table))) for table in tables])
            for name in texts
        },
    )


class TableBuilder:
    """Collects rows chunk by chunk into a `Table`, checking every value on the way.

    Args:
        file: where the rows come from.
        prefix: folder that goes before the paths of the rows.
        paths: further columns of paths to look for.
    """

    def __init__(self, file: Path, *, prefix: str = "", paths: Sequence[str] = ()) -> None:
        self.file, self.prefix = file, prefix
        self.aliases = {**ALIASES, **{name: (name,) for name in paths}}
        self.names: dict[str, str] = {}
        self._chunks: list[Table] = []
        self._converters: dict[str, Callable[[Any], Any]] = dict.fromkeys(NUMBER_COLUMNS, _number_value)
        self._converters |= dict.fromkeys(paths, _optional_text)
        self._converters |= {"media": _media_value, "caption": _caption_value}

    def add(self, columns: Mapping[str, Sequence[Any]], lines: Sequence[int]) -> None:
        """Append a chunk of rows: our column name → its values, `ABSENT` where a row lacks it."""
        converted = {name: self._convert(name, values, lines) for name, values in columns.items()}
        numbers = {name: np.asarray(converted[name], dtype=np.float64) for name in NUMBER_COLUMNS if name in converted}
        texts = {name: self._pack(name, converted[name], lines) for name in converted if name not in NUMBER_COLUMNS}
        line = np.array(lines, dtype=np.int64)
        self._chunks.append(Table((self.file,), np.zeros(1, np.int64), line, self.names, numbers, texts))

    def _convert(self, name: str, values: Sequence[Any], lines: Sequence[int]) -> Any:
        out: Any = _convert_plain(name, values)
        if out is None:
            out = []
            try:
                out.extend(map(self._converters[name], values))
            except ValueError as error:
                raise self._error(name, lines[len(out)], str(error)) from None
        if self.prefix and name not in (*NUMBER_COLUMNS, "caption"):
            out = [_with_prefix(self.prefix, text) for text in out]
        return out

    def _pack(self, name: str, texts: Sequence[str], lines: Sequence[int]) -> StringColumn:
        try:
            return StringColumn.pack(texts)
        except UnicodeEncodeError as error:  # JSON can spell half a character
            raise self._error(name, lines[texts.index(error.object)], f"not a text: {error.object!r}") from None

    def _error(self, name: str, line: int, message: str) -> DataError:
        return DataError(f"{self.file}:{line}: {self.names.get(name) or ' | '.join(self.aliases[name])}: {message}")

    def build(self) -> Table:
        """The finished table.

        Raises:
            DataError: it has no row.
        """
        if not self._chunks:
            raise DataError(f"{self.file}: no rows, so there is nothing to train on")
        joined = join_tables(self._chunks)
        return Table((self.file,), np.zeros(1, np.int64), joined.line, self.names, joined.numbers, joined.texts)


def _convert_plain(name: str, values: Sequence[Any]) -> Sequence[Any] | NDArray[np.float64] | None:
    """Convert a chunk at the speed of built-ins, if there is nothing special in it; a million rows take seconds."""
    kinds = set(map(type, values))
    if name in NUMBER_COLUMNS and kinds <= {str, int, float}:
        try:
            numbers = np.fromiter(map(float, values), dtype=np.float64, count=len(values))
        except (ValueError, OverflowError):
            return None
        return numbers if np.all(numbers >= 0) and np.all(numbers < LARGEST) else None
    if name not in NUMBER_COLUMNS and kinds == {str} and LIST_SEPARATOR not in "".join(values):
        return values if name != "media" or all(map(str.strip, values)) else None
    return None


def find_columns(header: Sequence[str], known: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Our column name → position in a header; the first alias wins.

    Args:
        known: our column name → its aliases.
    """
    position = {name: index for index, name in enumerate(header)}
    found: dict[str, int] = {}
    for ours, aliases in known.items():
        present = [position[name] for name in aliases if name in position]
        if present:
            found[ours] = present[0]
    return found


def check_columns(found: Mapping[str, Any], header: Sequence[str], where: str, *, require_caption: bool) -> None:
    """Refuse a header without the columns that must be there."""
    for needed in ("media", "caption") if require_caption else ("media",):
        if needed not in found:
            raise DataError(
                f"{where}: no {needed} column; expected one of {', '.join(ALIASES[needed])}, "
                f"found {', '.join(header) or 'nothing'}"
            )


def _with_prefix(prefix: str, text: str) -> str:
    return LIST_SEPARATOR.join(os.path.join(prefix, path) for path in text.split(LIST_SEPARATOR)) if text else text


def _media_value(value: Any) -> str:
    if value is ABSENT:
        raise ValueError("missing")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a path, got {reprlib.repr(value)}")
    return _join_texts([value])


def _caption_value(value: Any) -> str:
    """An empty caption is allowed (unconditional); a list holds several captions of one clip; words stay words."""
    if value is ABSENT:
        raise ValueError("missing")
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f'expected text or a list of texts, got {reprlib.repr(value)} (an empty caption is written "")'
        )
    return _join_texts(texts)


def _optional_text(value: Any) -> str:
    if value is None or value is ABSENT:
        return ""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected text or a list of texts, got {reprlib.repr(value)}")
    return _join_texts(texts)


def _join_texts(texts: Sequence[str]) -> str:
    if any(LIST_SEPARATOR in text for text in texts):
        raise ValueError("holds a NUL character")
    return LIST_SEPARATOR.join(texts)


def _number_value(value: Any) -> float:
    if value is None or value is ABSENT or value == "":
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"expected a number, got {reprlib.repr(value)}") from None
    if isinstance(value, bool) or not 0 <= number < LARGEST:
        raise ValueError(f"expected a number of at least 0 and below 2³¹, got {reprlib.repr(value)}")
    return number
