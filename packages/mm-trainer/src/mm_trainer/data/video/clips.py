"""What is known of every clip before it is read: size, length, rate, and the bucket that follows."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.metadata.table import Table
from mm_trainer.data.report import DataReport
from mm_trainer.data.video.buckets import Bucket
from mm_trainer.data.video.reader import MediaError, MediaInfo, is_image, probe

logger = logging.getLogger(__name__)

MANY = 1000
"""So many files to look at are worth a line in the log."""


@dataclass(frozen=True)
class ClipIndex:
    """Size, length and rate of every usable row's file, one value per row."""

    row: NDArray[np.int64]
    """The row of the table that clip i is."""
    width: NDArray[np.float64]
    height: NDArray[np.float64]
    frames: NDArray[np.float64]
    fps: NDArray[np.float64]
    duration: NDArray[np.float64]
    first: NDArray[np.float64]
    """Seconds from the file's start at which the clip begins."""

    @classmethod
    def build(cls, table: Table, folder: Path, report: DataReport) -> ClipIndex:
        """From the table where it says, else from the file; files that can't be used go into the report. Sizes and
        lengths below 1 say nothing: 0 is in use for "unknown".

        Every rank that opens a data set looks at the same files; stating width, height, num_frames and fps in the
        metadata spares it that.
        """
        count = len(table)
        width, height, frames, fps = (
            table.numbers.get(name, np.full(count, np.nan)).copy() for name in ("width", "height", "num_frames", "fps")
        )
        for stated in (width, height, frames):
            stated[stated < 1] = np.nan
        duration = np.divide(frames, fps, out=np.zeros(count), where=fps > 0)
        unknown = np.flatnonzero(np.isnan(width + height + frames) | ~(fps > 0)).tolist()
        for row, found in _look_at(table, folder, unknown):
            if isinstance(found, MediaError):
                report.skip(f"{table.where(row)}: {(folder / table.media(row)).absolute()}", str(found), bad=True)
                width[row] = np.nan
                continue
            width[row], height[row], frames[row] = found.width, found.height, found.frames
            fps[row], duration[row] = found.fps, found.duration
        first = np.divide(table.numbers.get("first_frame", np.zeros(count)), fps, out=np.zeros(count), where=fps > 0)
        index = cls(np.arange(count), width, height, frames, fps, duration, np.nan_to_num(first))
        return index.take(np.flatnonzero(~np.isnan(width)))

    def __len__(self) -> int:
        return len(self.row)

    def take(self, clips: NDArray[np.int64]) -> ClipIndex:
        """The index of some of the clips."""
        return replace(self, **{name: column[clips] for name, column in vars(self).items()})

    def info(self, clip: int) -> MediaInfo:
        return MediaInfo(
            width=int(self.width[clip]),
            height=int(self.height[clip]),
            frames=int(self.frames[clip]),
            fps=float(self.fps[clip]),
            duration=float(self.duration[clip]),
        )

    def available(self, clip: int, fps: float | None) -> int:
        """Frames that a clip gives at a rate from its beginning on."""
        return frames_left(self.info(clip), float(self.first[clip]), fps)

    def assign(self, choose: Callable[[MediaInfo, int], Bucket | None], fps: float | None) -> list[Bucket | None]:
        """The bucket of every clip: ``choose(what it is, frames it gives)``, asked once per kind of clip."""
        columns = (self.width, self.height, self.frames, self.fps, self.duration, self.first)
        return list(map(_Memo(choose, fps).__getitem__, zip(*(column.tolist() for column in columns), strict=True)))


class _Memo(dict[tuple[float, ...], "Bucket | None"]):
    def __init__(self, choose: Callable[[MediaInfo, int], Bucket | None], fps: float | None) -> None:
        super().__init__()
        self.choose, self.fps = choose, fps

    def __missing__(self, key: tuple[float, ...]) -> Bucket | None:
        width, height, frames, fps, duration, first = key
        info = MediaInfo(width=int(width), height=int(height), frames=int(frames), fps=fps, duration=duration)
        bucket = self[key] = self.choose(info, frames_left(info, first, self.fps))
        return bucket


def frames_left(info: MediaInfo, first: float, fps: float | None) -> int:
    """Frames that a file gives at a rate (None: its own) from ``first`` seconds on."""
    if info.fps == 0:
        return 1
    return max(0, info.frames_at(fps) - math.ceil(first * (fps or info.fps) - 1e-6))


def _look_at(table: Table, folder: Path, rows: list[int]) -> list[tuple[int, MediaInfo | MediaError]]:
    """Probe the files of some rows, several at a time; the time goes into the file system and FFmpeg."""

    def look(row: int) -> MediaInfo | MediaError:
        path = folder / table.media(row)
        width, height = table.number("width", row), table.number("height", row)
        if is_image(path) and width >= 1 and height >= 1:
            return MediaInfo(width=int(width), height=int(height), frames=1, fps=0.0, duration=0.0)
        try:
            return probe(path)
        except MediaError as error:
            return error

    if len(rows) > MANY:
        logger.info("%s: looking at %d files whose size, length or rate it doesn't state", table.files[0], len(rows))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(zip(rows, pool.map(look, rows), strict=True))
