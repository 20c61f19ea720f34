"""Writing DCP folders: chunk files that torch's own reader understands, and their ``.metadata``.

torch's `FileSystemWriter` is not used: it keeps every tensor of a file in memory until the file is closed (as soon as
tensors are cast or moved), hashes nothing, and leaves all of the flushing to the end.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint._disk.durable import DurableFile, FileRecord, write_bytes
from mm_checkpoint._disk.manifest import METADATA_NAME
from mm_checkpoint._formats.dcp_metadata import Extent
from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.source import bytes_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata


def chunk_file_name(rank: int, number: int = 0) -> str:
    """``__3_0.distcp``: the names that torch uses."""
    return f"__{rank}_{number}.distcp"


def write_tensor(file: DurableFile, name: str, tensor: torch.Tensor) -> Extent:
    """Append one chunk as ``torch.save`` writes it.

    Args:
        file: the chunk file.
        name: its name in the folder.
        tensor: a contiguous CPU tensor; only its own bytes are written, not those of a larger storage behind it.
    """
    import torch

    start = file.tell()
    if tensor.numel():
        # A view of exactly these bytes: `torch.save` writes the whole storage, however little of it the tensor uses.
        tensor = torch.frombuffer(bytes_of(tensor), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
    else:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        with _without_archive_checksums():
            torch.save(tensor, file)  # type: ignore[arg-type]  # it has the methods that torch.save uses
    except RuntimeError:
        if file.failure is not None:  # torch.save hides a full disk behind an error about its archive
            raise file.failure from None
        raise
    return Extent(name, start, file.tell() - start)


_lock = threading.Lock()
_inside: list[bool] = []


@contextmanager
def _without_archive_checksums() -> Iterator[None]:
    """Keep torch from hashing what we hash anyway, which took a third of a save's processor time.

    The option is process-wide: the first thread in switches it off, and the last one out restores it.
    """
    import torch

    with _lock:
        _inside.append(torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                torch.serialization.set_crc32_options(before)


def pickle_value(value: Any) -> bytes:
    """A plain value as DCP stores it, checked to load again without running code.

    Raises:
        TypeError: ``torch.load(weights_only=True)`` would refuse it.
    """
    import torch

    # Tried now, while the caller can still do something about it: a resume would be too late.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"a {type(value).__name__} can't be saved: it would not load again with weights_only"
        ) from error
    return buffer.getvalue()


def write_metadata(
    folder: Path,
    metadata: Metadata,
    extents: Mapping[tuple[str, tuple[int, ...] | None], Extent],
    *,
    sync: bool = True,
) -> FileRecord:
    """Write ``.metadata``: what the folder holds, and where.

    Args:
        folder: the folder of the chunk files.
        metadata: shapes, element types and chunks.
        extents: by (name, offsets of the chunk); the offsets are None for a value that isn't a tensor.
        sync: flush to disk before returning.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    # `_StorageInfo` is private, but it is what torch's own readers expect to find in the pickle.
    metadata.storage_data = {
        MetadataIndex(name, None if offsets is None else torch.Size(offsets)): _StorageInfo(
            extent.file, extent.offset, extent.length
        )
        for (name, offsets), extent in extents.items()
    }
    return write_bytes(folder / METADATA_NAME, pickle.dumps(metadata), sync=sync)


def describe_tensor(dtype: torch.dtype, shape: tuple[int, ...], boxes: list[Box]) -> Any:
    """One tensor's entry in ``.metadata``."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
