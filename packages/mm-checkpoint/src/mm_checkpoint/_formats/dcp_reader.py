"""Tensors of a DCP folder, read by slice.

torch's own `FileSystemReader` loads a whole stored chunk and cuts it afterwards: N ranks read a folder written by one
process N times over. A chunk is a zip archive whose tensor data is not compressed, which makes it possible to find the
bytes of any slice.
"""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mm_checkpoint._disk.files import FileReader, safe_join
from mm_checkpoint._formats.dcp_metadata import DcpMetadata, Extent, StoredTensor, read_dcp_metadata
from mm_checkpoint._formats.safetensors import read_runs
from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import is_known, itemsize
from mm_checkpoint._tensors.source import TensorInfo
from mm_checkpoint.errors import CorruptFileError

if TYPE_CHECKING:
    import torch

_EDGE = 2 << 10  # bytes read at each end of an archive, where everything but the data usually fits
_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name
_STORAGE_TYPES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


@dataclass(frozen=True)
class _Layout:
    """Where a chunk's elements are: the byte of its first element in the file, its shape and strides."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class DcpSource:
    """The tensors of a DCP folder (and, through `read_value`, everything else in it).

    Raises:
        SourceError, CorruptFileError: see `read_dcp_metadata`; also for a file that is missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: DcpMetadata = read_dcp_metadata(path)
        self._reader = FileReader()
        self._layouts: dict[Extent, _Layout] = {}
        self._lock = threading.Lock()
        self._check_files()
        self.tensors = {name: _describe(stored) for name, stored in self.metadata.tensors.items()}

    def _check_files(self) -> None:
        # Now, rather than in the middle of a load that has already filled half a model.
        ends: dict[str, int] = {}
        chunks = [extent for stored in self.metadata.tensors.values() for _, extent in stored.chunks]
        for extent in (*chunks, *self.metadata.values.values()):
            ends[extent.file] = max(ends.get(extent.file, 0), extent.offset + extent.length)
        for name, end in sorted(ends.items()):
            file = safe_join(self.path, name, found_in=str(self.path))
            if not file.is_file():
                raise CorruptFileError(f"{file}: missing, though the folder's .metadata needs it")
            if file.stat().st_size < end:
                raise CorruptFileError(f"{file}: truncated: {file.stat().st_size} bytes, {end} are needed")

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def read_into(self, key: str, box: Box, out: torch.Tensor) -> None:
        for chunk, extent in self.metadata.tensors[key].chunks:
            part = box.intersect(chunk)
            if part is None:
                continue
            inner = part.relative_to(chunk.offsets)
            target = out[part.relative_to(box.offsets).slices]
            if target.is_contiguous():  # the bytes can be read straight into it
                self._read_chunk(key, extent, chunk, inner, target)
            else:
                buffer = target.new_empty(part.sizes)
                self._read_chunk(key, extent, chunk, inner, buffer)
                target.copy_(buffer)

    def _read_chunk(self, key: str, extent: Extent, chunk: Box, box: Box, out: torch.Tensor) -> None:
        layout = self._checked_layout(key, extent, chunk)
        path = self.path / extent.file
        if layout.contiguous:
            read_runs(self._reader, path, layout.start, layout.shape, out.element_size(), box, out)
        else:
            out.copy_(self._read_strided(path, layout, out)[box.slices])

    def _checked_layout(self, key: str, extent: Extent, chunk: Box) -> _Layout:
        layout, dtype = self._layout(key, extent), self.metadata.tensors[key].dtype
        if layout.shape != chunk.sizes or layout.dtype != dtype:
            raise CorruptFileError(
                f"{self.path / extent.file}: {key} is a {layout.dtype} chunk of shape {layout.shape}, but .metadata "
                f"says {dtype} and {chunk.sizes}"
            )
        return layout

    def _read_strided(self, path: Path, layout: _Layout, like: torch.Tensor) -> torch.Tensor:
        # Our own chunks are contiguous; torch's writer keeps the strides of what it was given.
        count = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
        flat = like.new_empty(count)
        read_runs(self._reader, path, layout.start, (count,), flat.element_size(), Box.full((count,)), flat)
        return flat.as_strided(layout.shape, layout.stride)

    def _layout(self, key: str, extent: Extent) -> _Layout:
        with self._lock:  # parsed once: a chunk may be read in many slices
            if extent not in self._layouts:
                raw = _Window(self._reader, self.path / extent.file, extent)
                try:
                    self._layouts[extent] = _parse_item(raw, extent)
                except CorruptFileError:
                    raise
                except Exception as error:  # broken bytes can make zipfile or pickle fail in any way
                    message = f"{self.path / extent.file}: {key} at byte {extent.offset} is unreadable: {error}"
                    raise CorruptFileError(message) from error
            return self._layouts[extent]

    def check_items(self) -> None:
        """Find every chunk's data in its file and compare its shape and type with ``.metadata``; reads no data.

        Raises:
            CorruptFileError: a chunk can't be found, or isn't what ``.metadata`` says.
        """
        for key, stored in self.metadata.tensors.items():
            for box, extent in stored.chunks:
                self._checked_layout(key, extent, box)

    def read_value(self, key: str) -> Any:
        """A stored object that isn't a tensor, read by ``torch.load(weights_only=True)``."""
        import torch

        extent = self.metadata.values[key]
        raw = self._reader.read(self.path / extent.file, extent.offset, extent.length)
        try:
            return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises half a dozen types here
            raise CorruptFileError(f"{self.path / extent.file}: value {key} is unreadable: {error}") from error

    def close(self) -> None:
        self._reader.close()


def _describe(stored: StoredTensor) -> TensorInfo:
    files = sorted({extent.file for _, extent in stored.chunks})
    storage = (stored.chunks[0][1].file, stored.chunks[0][1].offset) if stored.chunks else None
    return TensorInfo(stored.shape, stored.dtype, ", ".join(files), storage)


class _Window(io.RawIOBase):
    """A read-only file made of one extent, for `zipfile`; its ends, which hold all but the data, are read once."""

    def __init__(self, reader: FileReader, path: Path, extent: Extent) -> None:
        self._reader, self._path, self._extent, self._position = reader, path, extent, 0
        edge = min(_EDGE, extent.length)
        self._edges = [(start, reader.read(path, extent.offset + start, edge)) for start in {0, extent.length - edge}]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._extent.length)[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._extent.length - self._position))
        for start, raw in self._edges:
            if start <= self._position and self._position + count <= start + len(raw):
                view[:count] = raw[self._position - start :][:count]
                break
        else:
            self._reader.read_into(self._path, self._extent.offset + self._position, view[:count])
        self._position += count
        return count


def _parse_item(window: _Window, extent: Extent) -> _Layout:
    """Find the tensor data inside one ``torch.save`` archive."""
    with zipfile.ZipFile(window) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        # Bytes go from the file into tensors as they are, so they must be in this machine's order.
        if "byteorder" in entries and _read_entry(window, entries["byteorder"]) != b"little":
            raise CorruptFileError(f"{extent.file}: stored on a big-endian machine")
        pickled = _read_entry(window, entries["data.pkl"])
    tensor = _TensorUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(tensor, _RebuiltTensor):
        raise CorruptFileError(f"{extent.file}: the item at byte {extent.offset} is no plain tensor")
    data, item_bytes = entries[f"data/{tensor.storage_key}"], itemsize(tensor.dtype)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    # Sizes and strides come from the pickle: unchecked, they could reach into a neighbour's bytes.
    if (
        min(tensor.storage_offset, *tensor.stride, 0) < 0
        or (tensor.storage_offset + last + 1) * item_bytes > data.file_size
    ):
        raise CorruptFileError(f"{extent.file}: the item at byte {extent.offset} reaches beyond its own data")
    start = _data_start(window, data) + tensor.storage_offset * item_bytes
    return _Layout(extent.offset + start, tensor.shape, tensor.stride, tensor.dtype)


def _data_start(window: _Window, entry: zipfile.ZipInfo) -> int:
    """The first byte of an entry's data; its local header may be longer than the archive's directory says."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CorruptFileError(f"the entry {entry.filename} is compressed")
    window.seek(entry.header_offset)
    header = window.read(_LOCAL_HEADER) or b""
    name_length, extra_length = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return entry.header_offset + _LOCAL_HEADER + name_length + extra_length


def _read_entry(window: _Window, entry: zipfile.ZipInfo) -> bytes:
    """An entry's bytes; `zipfile` itself would insist on the archive's checksums, which may be off."""
    window.seek(_data_start(window, entry))
    return window.read(entry.file_size) or b""


@dataclass(frozen=True)
class _RebuiltTensor:
    dtype: str
    storage_key: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: tuple[Any, ...], offset: int, shape: Any, stride: Any, *rest: Any) -> _RebuiltTensor:
    kind, key = storage[1], storage[2]
    return _RebuiltTensor(kind, str(key), int(offset), tuple(shape), tuple(stride))


def _rebuild_typed(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> _RebuiltTensor:
    """For element types without a storage class of their own: the dtype is the last argument."""
    plain = _rebuild(storage, offset, shape, stride)
    return _RebuiltTensor(rest[2], plain.storage_key, plain.storage_offset, plain.shape, plain.stride)


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of one tensor; see [Note: restricted unpickling]."""

    _ALLOWED: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): lambda *args: tuple(*args),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED:
            return self._ALLOWED[module, name]
        if module == "torch" and name in _STORAGE_TYPES:
            return _STORAGE_TYPES[name]
        if module == "torch" and is_known(name):
            return name
        if (module, name) == ("torch.storage", "UntypedStorage") or (module, name) == ("torch", "UntypedStorage"):
            return "uint8"
        raise CorruptFileError(f"an item names {module}.{name}, which no stored tensor needs: refused")

    def persistent_load(self, pid: Any) -> Any:
        return pid
