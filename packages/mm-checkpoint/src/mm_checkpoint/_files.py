"""Reading byte ranges, and writing files that are on the disk when we say so.

[Note: pipelined flush] A plain copy fills the page cache first and waits for the disk afterwards. `DurableFile` starts
an ``fdatasync`` in another thread every `FLUSH_EVERY` bytes, so the disk works while the next bytes are read and cast,
and the flush at the end has little left to do. Each piece is hashed in yet another thread while it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from mm_checkpoint.errors import CorruptFileError, DestinationError, SaveError

CHECKSUM = "xxh3_64"  # chosen by measurement, see the README
WRITE_PIECE = 1 << 20  # small enough for the processor's caches, so that hashing and writing read memory once
SMALL_WRITE = 64 << 10
FLUSH_EVERY = 64 << 20
PARTIAL_MARK = ".partial-"
SHARED_WITHIN_S = 10.0  # how long a network disk may take to show one rank's new file to another


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


class FileReader:
    """Positioned reads from any number of files, safe to share between threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on.

        Raises:
            CorruptFileError: the file ends before, is gone or can't be read.
        """
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor(path), [view[done:]], offset + done)
            except OSError as error:
                raise CorruptFileError(f"{path}: {error.strerror}") from error
            if count == 0:
                raise CorruptFileError(f"{path}: ends at byte {offset + done}, expected {len(view) - done} more")
            done += count
        with self._lock:
            self.bytes_read += done

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on."""
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._descriptors[path]

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()


class DurableFile:
    """A new file that is written once, front to back: counted, hashed and flushed as it grows.

    It has as much of a file's interface as ``torch.save`` needs.
    """

    def __init__(self, path: Path, *, checksum: bool = True, sync: bool = True) -> None:
        self._path = path
        self.failure: OSError | None = None
        """What the disk said, for callers that write through a library which hides it."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._size = 0
        self._small = bytearray()
        self._hash = xxhash.xxh3_64() if checksum else None
        self._sync = sync
        self._unflushed = 0
        self._helper = ThreadPoolExecutor(1, "durable-file")  # starts no thread before it is given work
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
        """Hand what small writes have gathered to the system."""
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
        if self._sync:
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        return FileRecord(self._size, None if self._hash is None else self._hash.hexdigest())

    def abandon(self) -> None:
        """Close after a failure; the file is of no use."""
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            self._end_flush()
        os.close(self._descriptor)

    def _start_flush(self) -> None:
        if self._flush is not None:
            if not self._flush.done():
                return
            self._flush.result()
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
        write_bytes(temporary, text.encode(), sync=sync)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """A json file that holds one object.

    Raises:
        CorruptFileError: it doesn't.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: unreadable json: {error}") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path}: holds a json {type(content).__name__}, expected an object")
    return content


def dump_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (its files' names) to the disk."""
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


def safe_join(folder: Path, name: str, *, found_in: str) -> Path:
    """``folder / name`` for a name that was read from a file: it may not leave its folder.

    Raises:
        CorruptFileError: an absolute name, one with ``..``, or one that isn't a file name at all.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise CorruptFileError(f"{found_in}: the file name {name!r} leaves its folder")
    return folder / pure


def partial_path(target: Path) -> Path:
    """A name beside ``target`` to build it under; it tells which process builds there."""
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return target.with_name(f".{target.name}{PARTIAL_MARK}{owner}")


def remove_leftovers(folder: Path, stem: str = "") -> list[Path]:
    """Delete what killed processes of this host left half-built in ``folder``; return what was deleted.

    A folder that another host or a living process builds is left alone.
    """
    removed = []
    for path in folder.glob(f".{stem}*{PARTIAL_MARK}*"):
        host, _, rest = path.name.rpartition(PARTIAL_MARK)[2].rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and rest.isdigit() and not _is_alive(int(rest)):
            remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a file or a folder, whichever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """`remove` after a failure, which is the error to report, whatever becomes of this."""
    with contextlib.suppress(OSError):
        remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def await_shared(path: Path) -> None:
    """Wait until a file or folder that another rank made shows here.

    Raises:
        DestinationError: it doesn't within `SHARED_WITHIN_S`.
    """
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise DestinationError(
                f"{path.parent}: rank 0 wrote there and this rank does not see it: checkpoints need a disk that all "
                "ranks share"
            )
        time.sleep(0.1)


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse to start writing what can't fit.

    Raises:
        SaveError: fewer than ``needed`` bytes (plus 1 % and 1 MiB for headers) are free.
    """
    free = shutil.disk_usage(folder).free
    wanted = needed + needed // 100 + (1 << 20)
    if free < wanted:
        raise SaveError(f"{folder}: {free:,} bytes are free, {wanted:,} are needed")


@contextlib.contextmanager
def build_folder(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` in one step when the block ends and vanishes if it raises.

    Raises:
        DestinationError: ``target`` exists and isn't an empty folder, or can't be made.
    """
    check_destination(target)
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent, target.name)
        partial.mkdir()
    except OSError as error:
        raise DestinationError(f"{target}: can't be made: {error}") from error
    try:
        yield partial
        publish(partial, target, sync=sync)
    except BaseException:
        discard(partial)
        raise


def check_destination(target: Path) -> None:
    """Raise DestinationError unless ``target`` is free: absent, or an empty folder."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise DestinationError(f"{target}: already exists; name a new or an empty folder")


def publish(partial: Path, target: Path, *, sync: bool = True) -> None:
    """Rename a finished folder into place and flush both folders' entries."""
    if sync:
        for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir() and not path.is_symlink())]:
            sync_folder(folder)
    partial.rename(target)
    if sync:
        sync_folder(target.parent)
