"""A folder as metadata: clips and images, each with its caption in a text file of the same name beside it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mm_trainer.data.metadata.table import Table, TableBuilder
from mm_trainer.errors import DataError

logger = logging.getLogger(__name__)

MissingCaptions = Literal["error", "empty", "skip"]

VIDEO_SUFFIXES = frozenset(
    {
        *(".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif", ".ts", ".m2ts", ".mts", ".wmv", ".asf", ".flv"),
        *(".mpg", ".mpeg", ".vob", ".3gp", ".3g2", ".ogv", ".apng", ".mxf", ".nut", ".ivf"),
    }
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
CAPTION_SUFFIX = ".txt"
NAMED = 5
"""Files that a message names."""


def read_folder(path: Path, *, require_caption: bool, missing: MissingCaptions) -> Table:
    """Every clip and image in a folder and those below it; what is left out is counted in the log.

    Args:
        path: the folder.
        require_caption: False for models that read no text.
        missing: what becomes of a clip without a caption file, where captions are required.

    Raises:
        DataError: captions are missing and that is an error, or one isn't UTF-8; all of them in one message.
    """
    files = sorted(_files_below(path))
    sidecars = {_stem(file): file for file in files if file.suffix.lower() == CAPTION_SUFFIX}
    media = [file for file in files if file.suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES]
    _tell_of_others(path, files, media, sidecars)
    without = [file for file in media if _stem(file) not in sidecars]
    if require_caption and without and missing == "error":
        raise DataError(
            f"{path}: {len(without)} of {len(media)} clips have no caption file: {_named(path, without)}; write them "
            "or set missing_captions to empty or skip"
        )
    if require_caption and without:
        what = "are left out" if missing == "skip" else "get an empty caption"
        counts = f"{len(without)} of {len(media)} clips have no caption file and {what}"
        logger.warning("%s: %s: %s", path, counts, _named(path, without))
        if missing == "skip":
            media = [file for file in media if _stem(file) in sidecars]
    captions = [_read_caption(sidecars[_stem(file)]) if _stem(file) in sidecars else "" for file in media]
    builder = TableBuilder(path)
    builder.names = {"media": "file", "caption": "caption file"}
    if media:
        names = [str(file.relative_to(path)) for file in media]
        builder.add({"media": names, "caption": captions}, range(1, len(media) + 1))
    return builder.build()


def _stem(file: Path) -> str:
    """The whole path but the suffix."""
    return os.fspath(file.with_suffix(""))


def _named(folder: Path, files: Sequence[Path]) -> str:
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return ", ".join(os.fspath(file.relative_to(folder)) for file in files[:NAMED]) + more


def _tell_of_others(folder: Path, files: Sequence[Path], media: Sequence[Path], sidecars: Mapping[str, Path]) -> None:
    """One line on files that aren't read, and on captions of nothing."""
    read = {*media, *sidecars.values()}
    others = Counter(file.suffix.lower() or "without suffix" for file in files if file not in read)
    orphans = sorted(sidecars.keys() - {_stem(file) for file in media})
    parts = [f"{count} {suffix}" for suffix, count in sorted(others.items())]
    if orphans:
        parts.append(f"{len(orphans)} captions without a clip ({_named(folder, [sidecars[stem] for stem in orphans])})")
    if parts:
        logger.warning("%s: not read: %s", folder, ", ".join(parts))


def _read_caption(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at offset {error.start}") from error


def _files_below(folder: Path) -> Iterator[Path]:
    """All files but hidden ones, through links to folders too; a folder reached twice is read once."""
    seen = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in files if not name.startswith("."))
