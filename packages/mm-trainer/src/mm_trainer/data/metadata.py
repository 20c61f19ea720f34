"""The table that says which clips there are: one row per sample, in compact columns.

Column names in use elsewhere are accepted (`ALIASES`). Numbers are optional; a number that isn't stated is NaN. Text is
UTF-8, with or without a byte order mark, whatever the locale. Every error names the file, the line and the column.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.columns import CHUNK, StringColumn
from mm_trainer.errors import DataError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "media": (
        *("video", "video_path", "path", "file_path", "file_name", "media_path"),
        *("image", "image_path"),
    ),
    "caption": ("caption", "prompt", "cap", "text"),
    "width": ("width",),
    "height": ("height",),
    "num_frames": ("num_frames", "frames"),
    "fps": ("fps", "frame_rate"),
    "first_frame": ("first_frame", "start_frame"),
    "mask": ("mask", "mask_path"),
    "reference": ("reference", "reference_image", "reference_images"),
}
"""Our name → the names it goes by, in the order of preference."""

TEXT_COLUMNS = ("media", "caption", "mask", "reference")
NUMBER_COLUMNS = ("width", "height", "num_frames", "fps", "first_frame")
CAPTION_SEPARATOR = "\0"
"""Between the captions of a row that has several; can't occur in text."""


@dataclass(frozen=True)
class Table:
    """Rows of metadata; row i of every column belongs to sample i."""

    file: Path
    media: StringColumn
    """Paths as written: relative ones count from the data folder."""
    caption: StringColumn
    line: NDArray[np.int64]
    """1-based line of the file that the row ends on (the row's number for formats without lines)."""
    names: Mapping[str, str]
    """Our column name → the file's."""
    numbers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """``width``, ``height``, ``num_frames``, ``fps``, ``first_frame``: whichever the file has."""
    texts: Mapping[str, StringColumn] = field(default_factory=dict)
    """``mask``, ``reference``: whichever the file has; an empty string where a row has none."""

    def __len__(self) -> int:
        return len(self.media)

    def where(self, row: int, column: str = "media") -> str:
        """``file:line: column``, for messages about one row."""
        return f"{self.file}:{int(self.line[row])}: {self.names.get(column, column)}"

    def captions(self, row: int) -> list[str]:
        """All captions of a row; at least one, maybe empty."""
        return self.caption[row].split(CAPTION_SEPARATOR)

    def number(self, column: str, row: int) -> float:
        """A number of a row, NaN if it isn't stated."""
        values = self.numbers.get(column)
        return math.nan if values is None else float(values[row])


Row = tuple[int, Sequence[Any]]
"""(line, values in the order of the header)."""


class TableBuilder:
    """Collects rows chunk by chunk into a `Table`, checking every value on the way.

    Args:
        file: where the rows come from.
        header: the file's column names.
        require_caption: refuse a file that has no caption column.
    """

    def __init__(self, file: Path, header: Sequence[str], *, require_caption: bool) -> None:
        self.file, self.header = file, list(header)
        self.position: dict[str, int] = {}
        for ours, aliases in ALIASES.items():
            found = [self.header.index(name) for name in aliases if name in self.header]
            if found:
                self.position[ours] = found[0]
        for needed in ("media", "caption") if require_caption else ("media",):
            if needed not in self.position:
                raise DataError(
                    f"{file}:1: no {needed} column; expected one of {', '.join(ALIASES[needed])}, "
                    f"found {', '.join(self.header) or 'nothing'}"
                )
        self.texts: dict[str, list[StringColumn]] = {name: [] for name in TEXT_COLUMNS if name in self.position}
        self.numbers: dict[str, list[NDArray[np.float64]]] = {
            name: [] for name in NUMBER_COLUMNS if name in self.position
        }
        self.lines: list[NDArray[np.int64]] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Append a chunk of rows."""
        if not rows:
            return
        lines = [line for line, _ in rows]
        columns = list(zip(*(values for _, values in rows), strict=True))
        for name, parts in self.texts.items():
            check = _media_value if name == "media" else _caption_value if name == "caption" else _text_value
            values = columns[self.position[name]]
            parts.append(StringColumn.build([self._convert(check, name, values, lines)]))
        for name, numbers in self.numbers.items():
            converted = self._convert(_number_value, name, columns[self.position[name]], lines)
            numbers.append(np.array(converted, dtype=np.float64))
        self.lines.append(np.array(lines, dtype=np.int64))

    def _convert(
        self, convert: Callable[[Any], Any], name: str, values: Sequence[Any], lines: Sequence[int]
    ) -> list[Any]:
        out: list[Any] = []
        try:
            out.extend(map(convert, values))
        except ValueError as error:
            line = lines[len(out)]
            column = self.header[self.position[name]]
            raise DataError(f"{self.file}:{line}: {column}: {error}") from None
        return out

    def build(self) -> Table:
        """The finished table.

        Raises:
            DataError: it has no row.
        """
        if not self.lines:
            raise DataError(f"{self.file}: no rows, so there is nothing to train on")
        texts = {name: _concatenate(parts) for name, parts in self.texts.items()}
        media = texts.pop("media")
        caption = texts.pop("caption", None)
        if caption is None:
            caption = StringColumn(np.empty(0, np.uint8), np.zeros(len(media), np.int64))
        return Table(
            file=self.file,
            media=media,
            caption=caption,
            line=np.concatenate(self.lines),
            names={name: self.header[index] for name, index in self.position.items()},
            numbers={name: np.concatenate(parts) for name, parts in self.numbers.items()},
            texts=texts,
        )


def read_table(path: Path, *, require_caption: bool = True) -> Table:
    """Open a metadata file; the format follows from its suffix.

    Args:
        path: ``.csv`` file.
        require_caption: refuse a file without a caption column (for models that read no text: False).

    Raises:
        DataError: missing file, unknown format, missing column, or a value that can't be used, with file, line and
            column.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"metadata file not found: {path.absolute()}")
    readers = {".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown metadata format {path.suffix!r}; known: {', '.join(sorted(readers))}")
    try:
        return reader(path, require_caption)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}") from error


def _read_csv(path: Path, require_caption: bool) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = [name.strip() for name in next(reader, [])]
        builder = TableBuilder(path, header, require_caption=require_caption)
        rows = _csv_rows(path, reader, len(header))
        while chunk := list(islice(rows, CHUNK)):
            builder.add(chunk)
    return builder.build()


def _csv_rows(path: Path, reader: Any, width: int) -> Iterator[Row]:
    try:
        for row in reader:
            if len(row) != width:
                if not row:  # a blank line
                    continue
                raise DataError(f"{path}:{reader.line_num}: {len(row)} fields, the header has {width}")
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}") from error


def _media_value(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("no path")
    return value


def _caption_value(value: Any) -> str:
    """An empty caption is allowed (unconditional); a list holds several captions of one clip; words stay words."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return CAPTION_SEPARATOR.join(value)
    raise ValueError(f'expected text or a list of texts, got {value!r} (an empty caption is written "")')


def _text_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return CAPTION_SEPARATOR.join(value)
    raise ValueError(f"expected text, got {value!r}")


def _number_value(value: Any) -> float:
    if value is None or value == "":
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, got {value!r}") from None
    if isinstance(value, bool) or number < 0 or math.isinf(number):
        raise ValueError(f"expected a number of at least 0, got {value!r}")
    return number


def _concatenate(parts: Sequence[StringColumn]) -> StringColumn:
    offset, ends = 0, []
    for part in parts:
        ends.append(part.ends + offset)
        offset += len(part.data)
    return StringColumn(np.concatenate([part.data for part in parts]), np.concatenate(ends))
