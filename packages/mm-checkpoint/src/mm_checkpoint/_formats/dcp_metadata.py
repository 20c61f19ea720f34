"""The ``.metadata`` pickle of a DCP folder, read without torch and without running anything it names.

[Note: restricted unpickling] A pickle may name any importable function and call it. This unpickler imports nothing:
each class that DCP itself writes is replaced by a stand-in of ours that only keeps its fields, and every other name is
refused.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.files import safe_join
from mm_checkpoint._disk.manifest import METADATA_NAME
from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import is_known
from mm_checkpoint.errors import CorruptFileError, SourceError

_CHECKPOINT = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class Extent:
    """Bytes ``[offset, offset + length)`` of a file in the folder: one item as ``torch.save`` wrote it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its global shape and element type, and the boxes it is stored in."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[Box, Extent], ...]


@dataclass(frozen=True)
class DcpMetadata:
    """What a DCP folder holds.

    Attributes:
        tensors: by flattened name.
        values: everything else, by flattened name: the place of its bytes.
        paths: flattened name to the keys that led to it in the saved state.
    """

    tensors: dict[str, StoredTensor]
    values: dict[str, Extent]
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class _Record:
    """Stands in for one of DCP's classes: keeps what the pickle sets, and does nothing."""

    # Fields that DCP leaves out of a pickle when they have their default.
    offset: Any = None
    transform_descriptors: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:  # `MetadataIndex` is a dictionary key in the pickle
        return hash((self.__dict__.get("fqn"), self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and self.__dict__ == other.__dict__


def _records(module: str, *names: str) -> dict[tuple[str, str], Callable[..., Any]]:
    return {(module, name): type(name, (_Record,), {}) for name in names}


def _first(*args: Any) -> Any:
    return args[0] if args else ()


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **_records(
        _CHECKPOINT + "metadata",
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    **_records(_CHECKPOINT + "filesystem", "_StorageInfo"),
    ("torch", "Size"): lambda *args: tuple(_first(*args)),
    ("torch", "device"): _Record,
    ("torch.serialization", "_get_layout"): _first,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "PurePosixPath"): _Record,
    ("pathlib", "Path"): _Record,
    # Python 3.13 moved the classes.
    ("pathlib._local", "PosixPath"): _Record,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and is_known(name):
            return name
        raise CorruptFileError(f"it names {module}.{name}, which no DCP folder needs: refused")


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read ``folder/.metadata``.

    Raises:
        SourceError: there is none.
        CorruptFileError: it can't be read, names anything but DCP's own types, or a file outside its folder.
    """
    path = folder / METADATA_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise SourceError(f"{folder}: no {METADATA_NAME}, so this is no (complete) DCP folder") from None
    try:
        return _convert(folder, _Unpickler(io.BytesIO(raw)).load())
    except CorruptFileError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    except Exception as error:  # broken bytes can make the unpickler or the conversion fail in any way
        raise CorruptFileError(f"{path}: unreadable: {type(error).__name__}: {error}") from error


def _convert(folder: Path, metadata: Any) -> DcpMetadata:
    extents: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for index, info in metadata.storage_data.items():
        if info.transform_descriptors:
            raise CorruptFileError(f"{index.fqn} is stored through the extension {info.transform_descriptors}")
        # Otherwise a crafted .metadata could make us read any file on the machine.
        safe_join(folder, info.relative_path, found_in=METADATA_NAME)
        offset = None if index.offset is None else tuple(index.offset)
        extents[index.fqn, offset] = Extent(info.relative_path, int(info.offset), int(info.length))
    tensors, values = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ == "BytesStorageMetadata":
            values[name] = extents[name, None]
        else:
            tensors[name] = _convert_tensor(name, entry, extents)
    paths = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
    return DcpMetadata(tensors, values, paths)


def _convert_tensor(name: str, entry: Any, extents: dict[tuple[str, tuple[int, ...] | None], Extent]) -> StoredTensor:
    properties = entry.properties
    # Recent versions pickle the properties as one tuple that starts with the element type, older ones as a dict.
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    shape = tuple(entry.size)
    chunks, covered = [], 0
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        fits = all(o >= 0 and o + s <= n for o, s, n in zip(*box, shape, strict=True))
        if not fits:
            raise CorruptFileError(f"{name}: a chunk {box} is outside the shape {shape}")
        if box.numel == 0:
            continue
        extent = extents.get((name, box.offsets)) or extents.get((name, None))
        if extent is None:
            raise CorruptFileError(f"{name}: the chunk at {box.offsets} has no place in any file")
        chunks.append((box, extent))
        covered += box.numel
    # A gap would leave whatever the tensor held before, silently.
    if covered != Box.full(shape).numel:
        raise CorruptFileError(f"{name}: the chunks hold {covered} elements of {Box.full(shape).numel}")
    return StoredTensor(shape, dtype, tuple(chunks))
