"""The forms that metadata comes in: CSV, JSON, JSONL, Parquet, a folder with sidecar texts, a list of annotation files.

Every error names the file, the line and the column.
"""

from __future__ import annotations

import csv
import gc
import json
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from mm_trainer.data.metadata.columns import CHUNK
from mm_trainer.data.metadata.folder import MissingCaptions, read_folder
from mm_trainer.data.metadata.table import (
    ABSENT,
    Table,
    TableBuilder,
    check_columns,
    find_columns,
    join_tables,
)
from mm_trainer.errors import DataError


def read_table(
    path: Path | str,
    *,
    require_caption: bool = True,
    paths: Sequence[str] = (),
    missing_captions: MissingCaptions = "error",
) -> Table:
    """Open metadata; the form follows from the suffix.

    Args:
        path: ``.csv``, ``.json`` (a list of objects), ``.jsonl``, ``.parquet`` (needs pyarrow), a folder of clips and
            images with one ``.txt`` next to each, or a ``.txt`` whose lines read ``folder,annotations.json`` (the
            annotation's paths count from the folder; both count from the ``.txt``'s own folder).
        require_caption: refuse rows without a caption column (for models that read no text: False).
        paths: further columns of paths to look for, besides the clip's own.
        missing_captions: what becomes of clips in a folder that have no caption file.

    Raises:
        DataError: missing file, unknown form, missing column, or a value that can't be used, with file, line and
            column.
    """
    path = Path(path)
    with _no_garbage_collection():
        if path.is_dir():
            return read_folder(path, require_caption=require_caption, missing=missing_captions)
        if path.suffix.lower() == ".txt":
            return _read_list(path, require_caption, paths)
        return _read_file(path, require_caption, prefix="", paths=paths)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rows are millions of short-lived lists without cycles; looking for some takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_file(path: Path, require_caption: bool, *, prefix: str, paths: Sequence[str]) -> Table:
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown metadata form {path.suffix!r}; known: {', '.join(readers)}, .txt, a folder")
    if not path.is_file():
        raise DataError(f"metadata file not found: {path.absolute()}")
    builder = TableBuilder(path, prefix=prefix, paths=paths)
    try:
        reader(path, builder, require_caption)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    return builder.build()


def _not_utf8(path: Path) -> DataError:
    """Says where; the error of a file that is decoded in parts counts from its part."""
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return DataError(f"{path}:{line}: not UTF-8: byte {data[error.start]:#04x} at offset {error.start}")
    return DataError(f"{path}: changed while it was read")


def _read_csv(path: Path, builder: TableBuilder, require_caption: bool) -> None:
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        reader = csv.reader(file, strict=True)
        header = [name.strip() for name in next(reader, [])]
        found = _name_columns(builder, header, f"{path}:1", require_caption)
        for lines, rows in _csv_chunks(path, reader):
            if set(map(len, rows)) != {len(header)}:
                line, row = next(pair for pair in zip(lines, rows, strict=True) if len(pair[1]) != len(header))
                raise DataError(f"{path}:{line}: {len(row)} fields, the header has {len(header)}")
            columns = list(zip(*rows, strict=True))
            builder.add({ours: columns[index] for ours, index in found.items()}, lines)


def _name_columns(builder: TableBuilder, header: Sequence[str], where: str, require_caption: bool) -> dict[str, int]:
    """Our column name → position in a header, and in the builder the file's own name."""
    found = find_columns(header, builder.aliases)
    check_columns(found, header, where, require_caption=require_caption)
    builder.names = {ours: header[index] for ours, index in found.items()}
    if twice := [name for name in builder.names.values() if header.count(name) > 1]:
        raise DataError(f"{where}: two columns are called {twice[0]}")
    return found


def _csv_chunks(path: Path, reader: Any) -> Iterator[tuple[Sequence[int], list[list[str]]]]:
    """Chunks of rows, and the line that each ends on; blank lines are passed over."""
    try:
        start = reader.line_num
        while rows := list(islice(reader, CHUNK)):
            lines: Sequence[int] = range(start + 1, start + len(rows) + 1)
            if reader.line_num != lines[-1] or [] in rows:  # some rows hold line breaks, or none of the fields
                heights = (1 + sum(field.count("\n") for field in row) for row in rows)
                ends = accumulate(heights, initial=start)
                next(ends)
                pairs = [(line, row) for line, row in zip(ends, rows, strict=True) if row]
                lines, rows = [line for line, _ in pairs], [row for _, row in pairs]
            start = reader.line_num
            if rows:
                yield lines, rows
    except csv.Error as error:
        raise DataError(f"{path}:{_line_of_bad_row(path)}: {error}; is a quote not closed?") from error


def _line_of_bad_row(path: Path) -> int:
    """Where the first row begins that can't be parsed; the parser itself notices lines later."""
    last = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        with suppress(csv.Error):
            for _ in reader:
                last = reader.line_num
    return last + 1


@contextmanager
def _long_fields() -> Iterator[None]:
    """Captions may be longer than the 131,072 characters that Python's parser allows by default."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_jsonl(path: Path, builder: TableBuilder, require_caption: bool) -> None:
    def rows() -> Iterator[tuple[int, Any]]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
                    except RecursionError:
                        raise DataError(f"{path}:{number}: too deeply nested") from None

    _add_objects(path, rows(), builder, require_caption)


def _read_json(path: Path, builder: TableBuilder, require_caption: bool) -> None:
    _add_objects(path, _json_rows(path, path.read_text(encoding="utf-8-sig")), builder, require_caption)


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list, each with the line it begins on."""
    decoder, space = json.JSONDecoder(), " \t\r\n"
    at = len(text) - len(text.lstrip(space))
    if text[at : at + 1] != "[":
        raise DataError(f"{path}:1: expected a list of objects")
    line, seen, at = 1, 0, at + 1
    while True:
        while text[at : at + 1] and text[at] in space + ",":
            at += 1
        if text[at : at + 1] == "]":
            if rest := text[at + 1 :].strip(space):
                line += text.count("\n", seen, len(text) - len(text[at + 1 :].lstrip(space)))
                raise DataError(f"{path}:{line}: the list has ended, but {rest[:20]!r} follows")
            return
        line, seen = line + text.count("\n", seen, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError:
            raise DataError(f"{path}:{line}: too deeply nested") from None
        yield line, value


def _add_objects(path: Path, rows: Iterable[tuple[int, Any]], builder: TableBuilder, require_caption: bool) -> None:
    """Add JSON objects, whose keys may differ from row to row."""
    rows, wanted = iter(rows), list(builder.aliases)
    plans: dict[tuple[str, ...], dict[str, str]] = {}
    while chunk := list(islice(rows, CHUNK)):
        columns: dict[str, list[Any]] = {name: [] for name in wanted}
        for line, row in chunk:
            if not isinstance(row, dict):
                raise DataError(f"{path}:{line}: expected an object, got {reprlib.repr(row)}")
            keys = tuple(row)
            plan = plans.get(keys)
            if plan is None:
                plan = plans[keys] = {ours: keys[index] for ours, index in find_columns(keys, builder.aliases).items()}
                check_columns(plan, keys, f"{path}:{line}", require_caption=require_caption)
                builder.names |= plan
            for name, values in columns.items():
                values.append(row[plan[name]] if name in plan else ABSENT)
        present = {name: values for name, values in columns.items() if name in builder.names}
        builder.add(present, [line for line, _ in chunk])


def _read_parquet(path: Path, builder: TableBuilder, require_caption: bool) -> None:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install 'mm-trainer[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            header = file.schema_arrow.names
            _name_columns(builder, header, str(path), require_caption)
            start = 1
            for batch in file.iter_batches(batch_size=CHUNK, columns=list(builder.names.values())):
                values = batch.to_pydict()
                lines = range(start, start + batch.num_rows)
                builder.add({ours: values[theirs] for ours, theirs in builder.names.items()}, lines)
                start += batch.num_rows
    except (ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: can't be read as Parquet: {error}") from error


def _read_list(path: Path, require_caption: bool, paths: Sequence[str]) -> Table:
    if not path.is_file():
        raise DataError(f"metadata file not found: {path.absolute()}")
    tables = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        folder, comma, annotations = (part.strip() for part in line.rpartition(","))
        if not comma or not folder or not annotations:
            raise DataError(f"{path}:{number}: expected `folder,annotations.json`, got {line!r}")
        try:
            prefix = str(path.parent / folder)
            tables.append(_read_file(path.parent / annotations, require_caption, prefix=prefix, paths=paths))
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
    if not tables:
        raise DataError(f"{path}: no rows, so there is nothing to train on")
    return join_tables(tables)
