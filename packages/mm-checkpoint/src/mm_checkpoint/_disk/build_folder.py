"""Folders that are built beside their place and renamed into it when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from mm_checkpoint._disk.durable import (
    PARTIAL_MARK,
    partial_path,
    sync_folder,
)
from mm_checkpoint.errors import DestinationError, SaveError


def remove_leftovers(folder: Path, stem: str = "") -> list[Path]:
    """Delete what killed processes of this host left half-built in ``folder``; return what was deleted.

    Anything that another host or a live process is building is left alone.
    """
    # A process number means something only on its own host: leftovers of another can't be told from work in progress.
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
    """`remove` after a failure; that failure is the one to report, even if this fails too."""
    with contextlib.suppress(OSError):
        remove(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, but belongs to another user
        return True
    return True


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse to start a write that won't fit, rather than fail after most of it.

    Raises:
        SaveError: fewer than ``needed`` bytes (plus 1 % and 1 MiB for headers) are free.
    """
    free = shutil.disk_usage(folder).free
    wanted = needed + needed // 100 + (1 << 20)
    if free < wanted:
        raise SaveError(f"{folder}: {free:,} bytes are free, {wanted:,} are needed")


@contextlib.contextmanager
def build_folder(target: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a folder to fill: it becomes ``target`` in one step when the block ends, and vanishes if the block raises.

    Raises:
        DestinationError: ``target`` exists and isn't an empty folder, or can't be created.
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
    except BaseException:  # an interrupt from the keyboard, too, leaves nothing behind
        discard(partial)
        raise


def check_destination(target: Path) -> None:
    """Raise DestinationError unless ``target`` is free: absent, or an empty folder."""
    # `exists` follows links, so a dangling one would pass for absent.
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise DestinationError(f"{target}: already exists; name a new or an empty folder")


def publish(partial: Path, target: Path, *, sync: bool = True) -> None:
    """Rename a finished folder into place and flush both folders' entries."""
    if sync:
        # Names before the rename: otherwise a power cut could leave a folder under its final name with files missing.
        for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir() and not path.is_symlink())]:
            sync_folder(folder)
    partial.rename(target)
    if sync:
        sync_folder(target.parent)  # the rename itself is an entry of the parent
