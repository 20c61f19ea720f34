"""Reading byte ranges and json, names that stay in their folder, and waiting for a shared disk."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

from mm_checkpoint.errors import CorruptFileError, DestinationError

SHARED_WITHIN_S = 10.0  # how long a network disk may take to show one rank's new file to another


class FileReader:
    """Positioned reads from any number of files, safe to share between threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on.

        Raises:
            CorruptFileError: the file ends too early, is gone or can't be read.
        """
        # Reads carry their own position, so threads can share a descriptor; they may return less than was asked for.
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


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a json file that holds one object.

    Raises:
        CorruptFileError: it is unreadable, or holds something else.
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


def safe_join(folder: Path, name: str, *, found_in: str) -> Path:
    """``folder / name`` for a name read from a file, which must not lead out of the folder.

    Raises:
        CorruptFileError: an absolute name, one with ``..``, or one that isn't a file name at all.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise CorruptFileError(f"{found_in}: the file name {name!r} leaves its folder")
    return folder / pure


def await_shared(path: Path) -> None:
    """Wait for a file or folder created by another rank to appear here.

    Raises:
        DestinationError: it doesn't appear within `SHARED_WITHIN_S`.
    """
    # A network file system caches folders: a name that exists may look absent for a while.
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise DestinationError(
                f"{path.parent}: rank 0 wrote there and this rank does not see it: checkpoints need a disk that all "
                "ranks share"
            )
        time.sleep(0.1)
