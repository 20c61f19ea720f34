"""The safetensors format: headers without torch, slices by position, and a writer that streams.

The `safetensors` package itself is used neither for reading, because it maps whole files (every page touched counts as
this process's memory, and a file truncated meanwhile ends in SIGBUS), nor for writing, because it wants all tensors of
a file in memory at once. The files are the same, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint._disk.durable import FileRecord, durable_file
from mm_checkpoint._disk.files import FileReader
from mm_checkpoint._tensors.box import Box, runs
from mm_checkpoint._tensors.dtypes import from_safetensors_code, itemsize, safetensors_code, to_torch
from mm_checkpoint._tensors.source import PIECE_BYTES, TensorInfo, TensorSource, bytes_of
from mm_checkpoint.errors import CorruptFileError, SourceError, sample

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100 << 20  # the format's own limit
# The order of tensors inside a file: wide types first, then by name (what the reference implementation writes).
_WRITE_ORDER = (
    *(
        "uint64",
        "int64",
        "float64",
        "complex64",
        "float32",
        "uint32",
        "int32",
        "bfloat16",
        "float16",
        "uint16",
        "int16",
    ),
    *("float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"),
)


def read_header(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], dict[str, str]]:
    """Parse and check a file's header: per tensor its info and first byte in the file, and the free metadata.

    Raises:
        CorruptFileError: not a safetensors file, truncated, or offsets that overlap, leave gaps or don't fit.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Before anything of that size is read: in a broken file it may be any 64-bit number.
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise CorruptFileError(f"{path}: not a safetensors file, or truncated ({size} bytes)")
        raw = file.read(length)
    try:
        entries = json.loads(raw, object_pairs_hook=_unique_keys)
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path}: unreadable safetensors header: {error}") from error
    # Tensors must fill the file without gaps or overlaps, as the format demands: wrong offsets would load silently.
    end = 8 + length
    for name, (info, start) in sorted(tensors.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if start != end:
            raise CorruptFileError(f"{path}: tensor {name} starts at byte {start}, expected {end}")
        end += info.nbytes
    if end != size:
        raise CorruptFileError(f"{path}: {size} bytes, but its header describes {end}")
    return tensors, metadata


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _parse_entry(path: Path, name: str, entry: dict[str, Any], base: int) -> tuple[TensorInfo, int]:
    dtype = from_safetensors_code(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name} has the unknown element type {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"tensor {name} has a negative or fractional size")
    if stop - start != math.prod(shape) * itemsize(dtype):
        raise ValueError(f"tensor {name} of shape {list(shape)} and type {dtype} takes {stop - start} bytes")
    return TensorInfo(shape, dtype, path.name), base + start


class SafetensorsSource:
    """One or more safetensors files as one set of tensors.

    Args:
        path: the file or folder, for messages.
        files: exactly the files to read (a stray neighbour is never looked at).
        weight_map: tensor name to file name, where an index json lists them; it must agree with the headers.

    Raises:
        CorruptFileError: an unreadable file.
        SourceError: a name in two files, or an index that doesn't agree with its files.
    """

    def __init__(self, path: Path, files: Sequence[Path], weight_map: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._reader = FileReader()
        self._places: dict[str, tuple[Path, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:  # all headers first, so that a truncated shard is found before any tensor is filled
            header, metadata = read_header(file)
            self.metadata |= metadata
            for name, (info, start) in header.items():
                if name in self.tensors:
                    raise SourceError(f"{path}: {name} is in both {self.tensors[name].file} and {file.name}")
                self.tensors[name] = info
                self._places[name] = (file, start)
        if weight_map is not None:
            self._check_index(weight_map)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        wrong = {n: f for n, f in weight_map.items() if n not in self.tensors or self.tensors[n].file != Path(f).name}
        if wrong:
            name, file = min(wrong.items())
            found = f"it is in {self.tensors[name].file}" if name in self.tensors else "no file holds it"
            raise SourceError(
                f"{self.path}: the index places {len(wrong)} tensor(s) where they are not: {name} should be in {file}, "
                f"but {found}"
            )
        unlisted = self.tensors.keys() - weight_map.keys()
        if unlisted:
            raise SourceError(f"{self.path}: {len(unlisted)} tensor(s) that the index doesn't list: {sample(unlisted)}")

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read_into(self, key: str, box: Box, out: torch.Tensor) -> None:
        file, start = self._places[key]
        info = self.tensors[key]
        read_runs(self._reader, file, start, info.shape, itemsize(info.dtype), box, out)

    def close(self) -> None:
        self._reader.close()


def read_runs(
    reader: FileReader, file: Path, start: int, shape: Sequence[int], itemsize: int, box: Box, out: torch.Tensor
) -> None:
    """Read ``box`` of a row-major tensor that begins at byte ``start`` into the contiguous ``out``."""
    view, done = bytes_of(out), 0
    for first, count in runs(shape, box):
        length = count * itemsize
        reader.read_into(file, start + first * itemsize, view[done : done + length])
        done += length


def write_file(
    path: Path,
    source: TensorSource,
    names: Sequence[str],
    *,
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    sync: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> FileRecord:
    """Stream tensors of ``source`` into one new file, at most `PIECE_BYTES` of a tensor in memory at a time.

    Args:
        path: the file to create.
        source: where the tensors come from.
        names: which of them.
        dtypes: the element type to store, for names whose type changes.
        metadata: the header's free metadata; ``{"format": "pt"}`` by default.
        sync: flush to disk before returning.
        on_bytes: called with the number of bytes after every piece.
    """
    targets = {name: (dtypes or {}).get(name, source.tensors[name].dtype) for name in names}
    ordered = sorted(names, key=lambda name: (_WRITE_ORDER.index(targets[name]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata) if metadata is not None else {"format": "pt"}}
    offset = 0
    for name in ordered:
        shape = source.tensors[name].shape
        size = math.prod(shape) * itemsize(targets[name])
        code = safetensors_code(targets[name])
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the data, as the reference implementation does
    with durable_file(path, sync=sync) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in ordered:
            for piece in stream_pieces(source, name, targets[name]):
                written = file.write(bytes_of(piece))
                if on_bytes is not None:
                    on_bytes(written)
        return file.finish()


def chunk_boxes(info: TensorInfo) -> Iterator[Box]:
    """The boxes of at most `PIECE_BYTES` in which a tensor is streamed, in row-major order; none if it is empty."""
    return Box.full(info.shape).pieces(PIECE_BYTES // itemsize(info.dtype))


def stream_pieces(source: TensorSource, name: str, dtype: str) -> Iterator[torch.Tensor]:
    """The tensor's values in row-major order, as contiguous pieces of type ``dtype``.

    A piece is valid only until the next one is requested: they share one buffer.
    """
    import torch

    info = source.tensors[name]
    stored, wanted = to_torch(info.dtype), to_torch(dtype)
    # One buffer for all pieces: fresh memory for each would cost its page faults every time.
    scratch = torch.empty(min(info.nbytes, PIECE_BYTES), dtype=torch.uint8)
    for box in chunk_boxes(info):
        piece = scratch[: box.numel * stored.itemsize].view(stored).reshape(box.sizes)
        source.read_into(name, box, piece)
        yield piece.to(wanted)
