"""Writing files that are on the disk when we say so.

[Note: pipelined flush] A plain copy fills the page cache first and waits for the disk afterwards. `DurableFile` starts
an ``fdatasync`` in another thread every `FLUSH_EVERY` bytes: the disk works while the next bytes are read and cast, and
the flush at the end has little left to do. Each piece is hashed just before it is written, while it is in the caches.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

CHECKSUM = "xxh3_64"  # chosen by measurement, see the README
WRITE_PIECE = 1 << 20  # small enough for the processor's caches, so that hashing and writing read memory once
SMALL_WRITE = 64 << 10
FLUSH_EVERY = 64 << 20
PARTIAL_MARK = ".partial-"


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file."""

    size: int
    checksum: str | None

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, CHECKSUM: self.checksum}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileRecord:
        return cls(int(value["size"]), value.get(CHECKSUM))


class DurableFile:
    """A new file that is written once, front to back: counted, hashed and flushed as it grows.

    It has as much of a file's interface as ``torch.save`` needs.
    """

    def __init__(self, path: Path, *, checksum: bool = True, sync: bool = True) -> None:
        self._path = path
        self.failure: OSError | None = None
        """The disk's own error, for callers that write through a library that hides it."""
        # O_EXCL: two writers under one name would mix their bytes.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._size = 0
        self._small = bytearray()
        self._hash = xxhash.xxh3_64() if checksum else None
        self._sync = sync
        self._unflushed = 0
        self._helper = ThreadPoolExecutor(1, "durable-file")  # starts no thread until it has work
        self._flush: Future[None] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if len(view) < SMALL_WRITE:  # torch.save makes dozens of them per tensor
            self._small += view
            if len(self._small) >= SMALL_WRITE:
                self.flush()
            return len(view)
        self.flush()
        for start in range(0, len(view), WRITE_PIECE):
            self._append(view[start : start + WRITE_PIECE])
        return len(view)

    def flush(self) -> None:
        """Hand the small writes collected so far to the system."""
        small, self._small = self._small, bytearray()
        if small:
            self._append(memoryview(small))

    def _append(self, piece: memoryview) -> None:
        if self._hash is not None:
            self._hash.update(piece)  # faster than memory, and leaves the piece in the cache for the write
        try:
            self._put(piece)
        except OSError as error:
            error.filename = str(self._path)
            self.failure = error
            raise
        self._size += len(piece)
        self._unflushed += len(piece)
        if self._sync and self._unflushed >= FLUSH_EVERY:
            self._start_flush()

    def _put(self, piece: memoryview) -> None:
        written = 0
        while written < len(piece):
            written += os.write(self._descriptor, piece[written:])

    def tell(self) -> int:
        return self._size + len(self._small)

    def finish(self) -> FileRecord:
        """Wait until every byte is on the disk, close the file and describe it."""
        self.flush()
        self._end_flush()
        if self._sync:  # covers what was written since the last fdatasync, and the file's metadata
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        return FileRecord(self._size, None if self._hash is None else self._hash.hexdigest())

    def abandon(self) -> None:
        """Close after a failure; the file is unusable."""
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            self._end_flush()
        os.close(self._descriptor)

    def _start_flush(self) -> None:
        if self._flush is not None:
            if not self._flush.done():  # the disk is behind; this data goes with the next flush
                return
            self._flush.result()  # a failed flush is reported once: a later fsync may succeed although data is lost
        self._flush = self._helper.submit(os.fdatasync, self._descriptor)
        self._unflushed = 0

    def _end_flush(self) -> None:
        self._helper.shutdown(wait=True)
        if self._flush is not None:
            self._flush.result()


@contextlib.contextmanager
def durable_file(path: Path, *, checksum: bool = True, sync: bool = True) -> Iterator[DurableFile]:
    """A `DurableFile` that is abandoned if the block raises; otherwise call ``finish`` inside the block."""
    file = DurableFile(path, checksum=checksum, sync=sync)
    try:
        yield file
    except BaseException:
        file.abandon()
        raise


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> FileRecord:
    """Write a small new file and flush it."""
    with durable_file(path, sync=sync) as file:
        file.write(data)
        return file.finish()


def replace_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Give ``path`` new contents in one step: a reader sees the old text or the new, never less."""
    temporary = partial_path(path)
    try:
        # Flushed before the rename: otherwise a power cut could leave the new name with no contents.
        write_bytes(temporary, text.encode(), sync=sync)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: an fsync of a file doesn't cover the file's name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> FileRecord:
    """Read a whole file and describe it as `DurableFile` would have."""
    hashed, size, buffer = xxhash.xxh3_64(), 0, bytearray(WRITE_PIECE)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            hashed.update(view[:count])
            size += count
            if on_bytes is not None:
                on_bytes(count)
    return FileRecord(size, hashed.hexdigest())


def partial_path(target: Path) -> Path:
    """A name beside ``target`` to build it under; it says which process is building.

    Beside it means on the same file system, the only place from which a rename is atomic.
    """
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return target.with_name(f".{target.name}{PARTIAL_MARK}{owner}")
