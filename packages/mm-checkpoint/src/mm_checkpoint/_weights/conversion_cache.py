"""Conversion on the fly: convert a source to DCP once, and use the result for as long as the source stays the same."""

from __future__ import annotations

import logging
from pathlib import Path

from mm_checkpoint._disk.build_folder import check_free_space, discard, publish, remove, remove_leftovers
from mm_checkpoint._disk.durable import partial_path, replace_text
from mm_checkpoint._disk.files import read_json
from mm_checkpoint._disk.iterations import TRACKER_NAME, damage_of, iteration_name
from mm_checkpoint._disk.manifest import MANIFEST_NAME, METADATA_NAME, read_manifest
from mm_checkpoint._formats.model_folder import target_dtypes
from mm_checkpoint._weights.convert import copy_companions, write_dcp_folder
from mm_checkpoint._weights.identity import (
    ProgressLog,
    lock,
    made_by_an_earlier_version,
    source_digest,
)
from mm_checkpoint._weights.sources import WeightSource, find_source
from mm_checkpoint.errors import DestinationError, SourceError

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_CONVERSION = "1"  # raise it when the same source would convert to something else


def converted(source: WeightSource) -> WeightSource:
    """``source`` itself or, if it names a cache, its converted form in there; converts if necessary.

    All ranks may call this at once: one reads and converts, the others wait at the lock and find the result. No
    process group is needed, and a cache on a node-local disk works too.

    Raises:
        DestinationError: the cache's folder holds something that isn't a conversion of ours.
        SourceError, CorruptFileError, SaveError: the conversion failed; it leaves nothing that would be used.
    """
    if source.cache is None:
        return source
    source.cache.mkdir(parents=True, exist_ok=True)
    folder = source.cache / iteration_name(0)
    _check_replaceable(folder)  # before gigabytes are read to compare them with it
    wanted = _fingerprint(source)
    # Without the lock first: a start that finds its conversion, by far the commonest, waits for no other process.
    if not _is_valid(folder, wanted):
        with lock(source.cache / LOCK_NAME, waiting_for="converts into it"):
            if not _is_valid(folder, wanted):  # asked again: another process may have converted while we waited
                _convert_into(source, folder, wanted)
    return find_source(folder, "dcp")


def _fingerprint(source: WeightSource) -> str:
    """What is stored in a conversion's manifest: which bytes it was made from, by which rules."""
    return f"{source_digest(source, beside=source.cache)}_{_CONVERSION}"


def _is_valid(folder: Path, wanted: str) -> bool:
    return damage_of(folder) is None and read_manifest(folder).get("source_fingerprint") == wanted


def _convert_into(source: WeightSource, folder: Path, wanted: str) -> None:
    _check_replaceable(folder)  # again: it may have appeared while we read the source or waited for the lock
    log.info("converting %s into %s%s", source.path, folder, _why_again(folder))
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
            on_bytes=ProgressLog(f"converting {source.path}", total),
        )
        if _fingerprint(source) != wanted:  # the memo answers, if nothing was written meanwhile
            raise SourceError(f"{source.path}: changed while it was converted; start again when it is complete")
        if folder.exists():
            # Moved aside first: a process killed while it deletes leaves a leftover, not half a conversion.
            stale = partial_path(folder)
            folder.rename(stale)
            remove(stale)
        publish(partial, folder)
    except BaseException:
        discard(partial)
        raise
    finally:
        tensors.close()
    replace_text(folder.parent / TRACKER_NAME, "0\n")  # last, as in a save: it names only what is there


def _why_again(folder: Path) -> str:
    """For the log: why a conversion that looks usable is made anew."""
    if damage_of(folder) is not None:
        return ""
    if made_by_an_earlier_version(read_manifest(folder).get("source_fingerprint")):
        return " again: version 0.1, which made the conversion there, compared only parts of the source"
    return " again: the conversion there was made from another source"


def _check_replaceable(folder: Path) -> None:
    """Only a conversion of ours, or what is left of one, may be replaced."""
    others = any(path.name != folder.name for path in folder.parent.glob("iter_*"))
    manifest = folder / MANIFEST_NAME
    ours = "source_fingerprint" in read_json(manifest) if manifest.exists() else True
    if others or not ours or (not manifest.exists() and (folder / METADATA_NAME).exists()):
        raise DestinationError(f"{folder.parent}: holds checkpoints that are no conversion of ours; name another cache")
