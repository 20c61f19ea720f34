"""The on-line form of conversion: convert a source to DCP once, and use that for as long as the source is the same."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from mm_checkpoint._disk.build_folder import check_free_space, discard, publish, remove, remove_leftovers
from mm_checkpoint._disk.durable import partial_path, replace_text
from mm_checkpoint._disk.files import read_json
from mm_checkpoint._disk.iterations import TRACKER_NAME, damage_of, iteration_name
from mm_checkpoint._disk.manifest import MANIFEST_NAME, METADATA_NAME, read_manifest
from mm_checkpoint._formats.model_folder import target_dtypes
from mm_checkpoint._formats.safetensors import MAX_HEADER
from mm_checkpoint._weights.convert import copy_companions, write_dcp_folder
from mm_checkpoint._weights.sources import WeightSource, find_source
from mm_checkpoint.errors import DestinationError

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0
_EDGE = 1 << 20
_CONVERSION = "1"  # raise it when the same source would be converted into something else


def fingerprint(source: WeightSource) -> str:
    """A digest of what the source holds, never of when it was written.

    Of every file its name, size, first and last MiB (for safetensors the whole header), plus index and configuration.
    """
    digest = hashlib.sha256(_CONVERSION.encode())
    for value in (source.weight_map, source.config):
        digest.update(json.dumps(value, sort_keys=True).encode())
    for path in source.files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            head = file.read(_EDGE)
            if path.suffix == ".safetensors":
                header = min(8 + int.from_bytes(head[:8], "little"), MAX_HEADER)
                head += file.read(max(0, header - _EDGE))
            digest.update(head)
            file.seek(max(0, size - _EDGE))
            digest.update(file.read())
    return digest.hexdigest()


def converted(source: WeightSource) -> WeightSource:
    """``source`` itself, or, where it names a cache, its converted form there; converts if need be.

    Every rank may call this at once: one converts, the others wait at the lock and find the result. No process group is
    needed, and a cache on a node-local disk works too.

    Raises:
        DestinationError: the cache's folder holds something that is no conversion of ours.
        SourceError, CorruptFileError, SaveError: the conversion failed; it leaves nothing that would be used.
    """
    if source.cache is None:
        return source
    folder = source.cache / iteration_name(0)
    wanted = fingerprint(source)
    if not _is_valid(folder, wanted):
        with _lock(source.cache):
            if not _is_valid(folder, wanted):
                _convert_into(source, folder, wanted)
    return find_source(folder, "dcp")


def _is_valid(folder: Path, wanted: str) -> bool:
    return damage_of(folder) is None and read_manifest(folder).get("source_fingerprint") == wanted


def _convert_into(source: WeightSource, folder: Path, wanted: str) -> None:
    _check_replaceable(folder)
    log.info("converting %s into %s", source.path, folder)
    remove_leftovers(folder.parent)
    partial = partial_path(folder)
    partial.mkdir()
    tensors = source.open()
    try:
        total = sum(info.nbytes for info in tensors.tensors.values())
        check_free_space(partial, total)
        extra = {"step": 0, "converted_from": source.format, "source": str(source.path), "source_fingerprint": wanted}
        dtypes = target_dtypes(tensors, None)
        write_dcp_folder(
            partial,
            tensors,
            dtypes=dtypes,
            workers=1,
            companions=copy_companions(source, partial),
            extra=extra,
            on_bytes=_ProgressLog(source.path, total),
        )
        if folder.exists():
            stale = partial_path(folder)
            folder.rename(stale)
            remove(stale)
        publish(partial, folder)
    except BaseException:
        discard(partial)
        raise
    finally:
        tensors.close()
    replace_text(folder.parent / TRACKER_NAME, "0\n")


class _ProgressLog:
    """Called with the bytes that were written; says every few seconds how far a conversion has come."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total, self._done, self._told = path, total, 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._told >= PROGRESS_EVERY_S:
            self._told = time.monotonic()
            log.info("converting %s: %.1f of %.1f GB", self._path, self._done / 1e9, self._total / 1e9)


def _check_replaceable(folder: Path) -> None:
    """Only a conversion of ours, or what is left of one, may be replaced."""
    others = any(path.name != folder.name for path in folder.parent.glob("iter_*"))
    manifest = folder / MANIFEST_NAME
    ours = "source_fingerprint" in read_json(manifest) if manifest.exists() else True
    if others or not ours or (not manifest.exists() and (folder / METADATA_NAME).exists()):
        raise DestinationError(f"{folder.parent}: holds checkpoints that are no conversion of ours; name another cache")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the cache's lock; a disk without locks only costs double work, since results are renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: another process converts into it; waiting", folder)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s can't be locked (%s): several processes may convert at once", folder, error)
        yield
