"""Which weights a source holds: a digest of all its bytes, and a memo that saves reading unchanged files again.

[Note: one rule] Two sources are the same if, and only if, their digests are equal. What the file system says about a
file (size, times, inode, device) never decides that: a merge keeps the size, ``cp -p`` keeps the time. It tells only
whether *this* file was written to since it was last read; a program can set a file's ``mtime`` but not its ``ctime``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from mm_checkpoint._disk.durable import WRITE_PIECE, replace_text
from mm_checkpoint._disk.files import read_json
from mm_checkpoint._disk.manifest import METADATA_NAME
from mm_checkpoint._weights.sources import WeightSource
from mm_checkpoint.errors import CorruptFileError, SourceError

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0
MEMO_NAME, MEMO_LOCK_NAME = ".digests.json", ".digests.lock"
DIGEST = "xxh3_128"
"""Also the prefix of every digest, which sets it apart from those of earlier versions."""
_THREADS = 4
_KEPT_PER_FILE = 16  # a disk may have a different device number on every node that mounts it
# A file that was written to this recently may be written to again under the same time stamp, so it isn't remembered.
_SETTLED_NS = 2_000_000_000


def source_digest(source: WeightSource, *, beside: Path | None = None) -> str:
    """A digest of what the source holds: all bytes of its files, their names, the index and ``config.json``.

    Reads every byte, unless ``beside`` holds a memo of an earlier reading and the file wasn't written to since. Several
    processes may call this at once: if they share ``beside``, one reads and the others wait for its memo.

    Args:
        source: what `resolve_source` returned.
        beside: an existing folder (that of the cache that depends on the source) which keeps the memo.

    Returns:
        ``xxh3_128_`` and 64 hexadecimal digits; equal on every machine.

    Raises:
        SourceError: a file is missing, unreadable, or changed while it was read.
    """
    files = _weight_files(source)
    memo = _Memo(beside) if beside is not None else None
    digests = memo.look_up(files) if memo is not None else None
    if digests is None and memo is not None and memo.writable:
        with lock(memo.lock, waiting_for="reads the weights"):
            # Looked up again: the process that held the lock may have read the same files.
            digests = memo.look_up(files) or _digest_files(source.path, files, memo)
    elif digests is None:
        digests = _digest_files(source.path, files, memo)
    root = source.files[0] if source.format == "dcp" else None
    names = [str(file.relative_to(root)) if root is not None else file.name for file in files]
    # Config, index and names count too: they decide how the bytes are read.
    content = [source.config, source.weight_map, list(zip(names, digests, strict=True))]
    return f"{DIGEST}_{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}"


def _weight_files(source: WeightSource) -> list[Path]:
    """The files that hold the source's tensors; those of a DCP folder in the order of their names."""
    if source.format != "dcp":
        return list(source.files)
    folder = source.files[0]
    return [folder / METADATA_NAME, *sorted(folder.glob("*.distcp"))]


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from error


def _identity(stat: os.stat_result) -> str:
    """Changes whenever a file is written to or replaced; comparable on one machine only."""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


class _Memo:
    """The digests of files that were read before: path → identity → digest."""

    def __init__(self, folder: Path) -> None:
        self._path, self.lock = folder / MEMO_NAME, folder / MEMO_LOCK_NAME
        self.writable = os.access(folder, os.W_OK)
        """Whether anything can be remembered here; if not, there is nothing to wait for either."""

    def look_up(self, files: Sequence[Path]) -> list[str] | None:
        """The digests of all files, or None if one of them has to be read."""
        known = self._read()
        found = [known.get(_key(file), {}).get(_identity(_stat(file))) for file in files]
        digests = [digest for digest in found if digest is not None]
        return digests if len(digests) == len(files) else None

    def remember(self, files: Sequence[Path], digests: Sequence[str], identities: Sequence[str | None]) -> None:
        """Keep the digests of the files that have an identity."""
        if not any(identities):
            return
        known = self._read()  # again: another process may have added entries since
        for file, digest, identity in zip(files, digests, identities, strict=True):
            if identity is not None:
                entries = known.pop(_key(file), {}) | {identity: digest}
                known[_key(file)] = dict(list(entries.items())[-_KEPT_PER_FILE:])
        try:
            replace_text(self._path, json.dumps({"format": DIGEST, "files": known}, indent=1) + "\n")
        except OSError as error:  # a memo only saves time, so that a failure to write one stops nothing
            log.warning("%s can't be written (%s): the next start reads the weights again", self._path, error)

    def _read(self) -> dict[str, dict[str, str]]:
        """What is remembered; a memo that is damaged or of another kind is as good as none."""
        try:
            content = read_json(self._path) if self._path.is_file() else {}
        except CorruptFileError as error:
            log.warning("%s: the weights are read again", error)
            return {}
        files = content.get("files") if content.get("format") == DIGEST else None
        return {path: dict(entries) for path, entries in files.items()} if isinstance(files, Mapping) else {}


def _key(file: Path) -> str:
    return os.path.realpath(file)


def _digest_files(path: Path, files: Sequence[Path], memo: _Memo | None) -> list[str]:
    """Digests of all files, a few read at a time, those that the memo knows left out; what is read is remembered."""
    progress = ProgressLog(f"reading {path} to tell whether it changed", sum(_stat(file).st_size for file in files))

    def digest(file: Path) -> tuple[str, str | None]:
        known = memo.look_up([file]) if memo is not None else None
        return (known[0], None) if known is not None else digest_file(file, progress)

    # Several files at a time: a single reader rarely keeps a fast disk busy.
    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        done = list(pool.map(digest, files))
    digests = [entry[0] for entry in done]
    if memo is not None and memo.writable:
        memo.remember(files, digests, [entry[1] for entry in done])
    return digests


def digest_file(file: Path, on_bytes: Callable[[int], None] | None = None) -> tuple[str, str | None]:
    """The XXH3-128 digest of a file's bytes, and its identity, or None if it was written to a moment ago.

    Raises:
        SourceError: it is missing, unreadable, or changed while it was read.
    """
    hashed, view = xxhash.xxh3_128(), memoryview(bytearray(WRITE_PIECE))
    try:
        with file.open("rb", buffering=0) as opened:
            # Of the open file, not of its path: another file may take that name meanwhile.
            before, started = os.fstat(opened.fileno()), time.time_ns()
            while count := opened.readinto(view):
                hashed.update(view[:count])
                if on_bytes is not None:
                    on_bytes(count)
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from error
    if _identity(before) != _identity(after):
        raise SourceError(f"{file}: changed while it was read; start again when it is complete")
    settled = started - max(before.st_ctime_ns, before.st_mtime_ns) > _SETTLED_NS
    return hashed.hexdigest(), _identity(before) if settled else None


class ProgressLog:
    """Call it with the bytes done, from any thread; it logs every few seconds how far the work has come."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._told = what, total, 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._told < PROGRESS_EVERY_S:
                return
            self._told = time.monotonic()
        log.info("%s: %.1f of %.1f GB", self._what, self._done / 1e9, self._total / 1e9)


@contextlib.contextmanager
def lock(path: Path, *, waiting_for: str) -> Iterator[None]:
    """Hold a lock file. A disk without locks costs no more than double work: results are renamed into place.

    Args:
        path: the file, in a folder that exists.
        waiting_for: what the process that holds it is doing, for the log.
    """
    with path.open("w") as file:
        try:
            try:  # the system drops the lock when a process ends, however it ends: no stale locks to clean up
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: another process %s; waiting", path.parent, waiting_for)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s can't be locked (%s): several processes may do the same work", path.parent, error)
        yield


def made_by_an_earlier_version(digest: Any) -> bool:
    """Whether a stored digest is of the kind that looked at only parts of the files (up to version 0.1)."""
    return isinstance(digest, str) and not digest.startswith(f"{DIGEST}_")
