"""`VideoDataset`: clips and images from files, with captions from a metadata table."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from torch import Tensor

from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.contracts.spec import Options as BaseOptions
from mm_trainer.data.metadata import Table
from mm_trainer.data.metadata_formats import read_table
from mm_trainer.data.reader import MediaError, MediaInfo, is_image, probe, read_frames, read_image, resize
from mm_trainer.data.report import DataReport
from mm_trainer.data.shaping import (
    Bucket,
    BudgetBuckets,
    FixedBuckets,
    check_bucket,
    cover,
    floor_frames,
    parse_buckets,
)
from mm_trainer.errors import BadSample, DataError
from mm_trainer.randomness import keyed_generator

logger = logging.getLogger(__name__)


class VideoOptions(BaseOptions):
    """``data.dataset_param`` with ``dataset_type: video``."""

    data_path: Path
    """Metadata file."""
    data_folder: Path | None = None
    """What relative paths in the metadata count from; default: the metadata's folder."""
    num_frames: int | None = Field(default=None, ge=1)
    """Frames of a clip: of buckets that don't say, and the most that ``max_pixels`` makes."""
    fps: float | None = Field(default=16.0, gt=0)
    """Clips are read at this rate; null: each at its own average rate."""
    buckets: list[list[int]] | None = None
    """``[height, width]`` or ``[frames, height, width]`` each."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Instead of buckets: height × width of the largest ones to make."""
    aspect_tolerance: float = Field(default=0.1, gt=0, lt=0.5)
    """With ``max_pixels``: the share of a side that may be cropped to keep the number of buckets small."""
    short_clips: Literal["skip", "floor"] = "skip"
    clip_start: Literal["first", "random"] = "first"
    """Where in a long clip the frames are taken; a ``first_frame`` in the metadata goes before."""
    crop: Literal["center", "random"] = "center"
    flip: float = Field(default=0.0, ge=0, le=1)
    """Probability of mirroring a clip left to right."""
    tokenizer: str | None = None
    """Folder of the tokenizer; read by the framework, which hands over the tokenise step."""
    caption_dropout: float = Field(default=0.0, ge=0, le=1)
    """Probability of an empty caption."""


class VideoDataset:
    """Clips shaped into buckets.

    A sample is ``video`` (3, F, H, W) float32 in [−1, 1], ``caption`` (text) and, if the model reads text,
    ``prompt_ids`` and ``prompt_mask`` (L,) int64.

    Args:
        config: the ``dataset_param`` section, without ``dataset_type``.
        context: what the run asks for.

    Raises:
        DataError: the metadata can't be used, or no row of it is left.
    """

    Options = VideoOptions

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        try:
            self.options = VideoOptions.model_validate(dict(config))
        except ValidationError as error:
            raise DataError(f"dataset_param: {error}") from error
        self.context = context
        self.table = read_table(self.options.data_path, require_caption=context.tokenizer is not None)
        self.folder = self.options.data_folder or self.options.data_path.parent
        self.report = DataReport(rows=len(self.table))
        clips = ClipIndex.build(self.table, self.folder, self.report)
        self._assign_buckets(clips)
        for line in self.report.lines():
            logger.warning("%s: %s", self.options.data_path, line)
        if len(self) == 0:
            raise DataError(f"{self.options.data_path}: nothing usable: {'; '.join(self.report.lines())}")

    def _assign_buckets(self, clips: ClipIndex) -> None:
        """Give every usable row its bucket; fills ``rows`` (sample → row) and ``buckets``."""
        spec, fps = self.context.input_spec, self.options.fps
        chooser = make_chooser(self.options, spec)
        rows: list[int] = []
        buckets: list[Bucket] = []
        known: dict[Bucket, Bucket] = {}
        for row in clips.usable():
            info = clips.info(row)
            frames = info.frames_at(fps) - self._offset_frames(row, info)
            bucket = chooser.choose(frames=frames, height=info.height, width=info.width)
            if bucket is None and self.options.short_clips == "floor" and frames > 0:
                shaped = chooser.choose(frames=chooser.shortest, height=info.height, width=info.width)
                bucket = shaped._replace(frames=floor_frames(frames, spec)) if shaped else None
            if bucket is None:
                self.report.skip(f"{self.table.media(row)} ({frames} frames)", "too short", bad=False)
                continue
            rows.append(row)
            buckets.append(known.setdefault(bucket, bucket))
        self.rows = np.array(rows, dtype=np.int64)
        self.clips = clips
        self._buckets = list(known)
        numbers = {bucket: number for number, bucket in enumerate(self._buckets)}
        self._bucket_of = np.array([numbers[bucket] for bucket in buckets], dtype=np.int32)
        self._tokens = [spec.tokens(*bucket) for bucket in self._buckets]

    def _offset_frames(self, row: int, info: MediaInfo) -> int:
        return math.ceil(self._first_time(row, info) * self._rate(info) - 1e-6)

    def _first_time(self, row: int, info: MediaInfo) -> float:
        first = self.table.number("first_frame", row)
        return 0.0 if math.isnan(first) or not info.fps else first / info.fps

    def _rate(self, info: MediaInfo) -> float:
        return self.options.fps or info.fps

    def __len__(self) -> int:
        return len(self.rows)

    def bucket(self, index: int) -> Bucket:
        return self._buckets[self._bucket_of[index]]

    def tokens(self, index: int) -> int:
        return self._tokens[self._bucket_of[index]]

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        """Read one clip; see the class for what a sample holds.

        Raises:
            BadSample: the file can't be read.
        """
        row = int(self.rows[index])
        generator = keyed_generator(self.context.seed, "augmentation", sample_key)
        try:
            frames = self._read(row, self.bucket(index), torch.rand(4, generator=generator).tolist())
        except MediaError as error:
            raise BadSample(f"{self.table.where(row)}: {self.path(row)}", str(error)) from error
        sample: dict[str, Any] = {"video": to_video(frames), "caption": self._caption(row, sample_key)}
        if self.context.tokenizer is not None:
            tokens = self.context.tokenizer([sample["caption"]])
            sample |= {name: values[0] for name, values in tokens.items()}
        return sample

    def path(self, row: int) -> Path:
        return self.folder / self.table.media(row)

    def _read(self, row: int, bucket: Bucket, draws: list[float]) -> NDArray[np.uint8]:
        """Frames of one clip, (F, H, W, 3); ``draws`` are four uniform numbers: start, crop across, crop down, flip."""
        start, across, down, flip = draws
        if self.options.crop == "center":
            across = down = 0.5
        info, path = self.clips.info(row), self.path(row)
        crop = cover(bucket, height=info.height, width=info.width, across=across, down=down)
        if is_image(path):
            frames = resize(read_image(path), height=crop.height, width=crop.width)[None]
        else:
            rate, first = self._rate(info), self._first_time(row, info)
            spare = info.frames_at(rate) - self._offset_frames(row, info) - bucket.frames
            if self.options.clip_start == "random" and spare > 0:
                first += math.floor(start * (spare + 1)) / rate
            times = [first + number / rate for number in range(bucket.frames)]
            frames = read_frames(path, times, height=crop.height, width=crop.width)
        frames = frames[:, crop.top : crop.top + bucket.height, crop.left : crop.left + bucket.width]
        return frames[:, :, ::-1] if flip < self.options.flip else frames

    def _caption(self, row: int, sample_key: int) -> str:
        generator = keyed_generator(self.context.seed, "caption", sample_key)
        dropped, choice = torch.rand(2, generator=generator).tolist()
        captions = self.table.captions(row)
        return "" if dropped < self.options.caption_dropout else captions[int(choice * len(captions))]


def make_chooser(options: VideoOptions, spec: InputSpec) -> FixedBuckets | BudgetBuckets:
    """The rule that gives a clip its bucket.

    Raises:
        DataError: neither or both of ``buckets`` and ``max_pixels``, or a size that the model can't take.
    """
    if (options.buckets is None) == (options.max_pixels is None):
        raise DataError("dataset_param: give one of buckets and max_pixels")
    if options.buckets is not None:
        buckets = parse_buckets(options.buckets, options.num_frames)
        if not buckets:
            raise DataError("dataset_param.buckets: empty")
        return FixedBuckets(tuple(check_bucket(bucket, spec) for bucket in buckets))
    if options.num_frames is None or options.max_pixels is None:
        raise DataError("dataset_param: max_pixels needs num_frames")
    unit = spec.spatial_multiple
    if options.max_pixels < unit * unit:
        raise DataError(f"dataset_param.max_pixels: {options.max_pixels} is below the smallest frame, {unit}×{unit}")
    check_bucket(Bucket(options.num_frames, unit, unit), spec)
    return BudgetBuckets((options.num_frames,), options.max_pixels, options.aspect_tolerance, unit)


def to_video(frames: NDArray[np.uint8]) -> Tensor:
    """(F, H, W, 3) uint8 → (3, F, H, W) float32 in [−1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(3, 0, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1.0)


class ClipIndex:
    """Size, length and rate of every row's file: from the metadata where it says, else from the file.

    Args:
        width, height, frames, fps, duration: one value per row; NaN width marks a row that can't be used.
    """

    def __init__(
        self,
        width: NDArray[np.float64],
        height: NDArray[np.float64],
        frames: NDArray[np.float64],
        fps: NDArray[np.float64],
        duration: NDArray[np.float64],
    ) -> None:
        self._columns = (width, height, frames, fps, duration)

    @classmethod
    def build(cls, table: Table, folder: Path, report: DataReport) -> ClipIndex:
        """Look at every file whose row doesn't state width, height, num_frames and fps."""
        count = len(table)
        stated = [table.numbers.get(name, np.full(count, np.nan)) for name in ("width", "height", "num_frames", "fps")]
        width, height, frames, fps = (column.copy() for column in stated)
        duration = np.divide(frames, fps, out=np.zeros(count), where=fps > 0)
        unknown = np.flatnonzero(np.isnan(width) | np.isnan(height) | np.isnan(frames) | np.isnan(fps))
        if len(unknown) > 1000:
            logger.info("looking at %d files whose size and length %s doesn't state", len(unknown), table.files[0])

        def look(row: int) -> MediaInfo | MediaError:
            try:
                return probe(folder / table.media(row))
            except MediaError as error:
                return error

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for row, found in zip(unknown.tolist(), pool.map(look, unknown.tolist()), strict=True):
                if isinstance(found, MediaError):
                    report.skip(f"{table.where(row)}: {(folder / table.media(row)).absolute()}", str(found), bad=True)
                    width[row] = np.nan
                    continue
                width[row], height[row], frames[row] = found.width, found.height, found.frames
                fps[row], duration[row] = found.fps, found.duration
        return cls(width, height, frames, fps, duration)

    def usable(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(~np.isnan(self._columns[0]))]

    def info(self, row: int) -> MediaInfo:
        width, height, frames, fps, duration = (float(column[row]) for column in self._columns)
        return MediaInfo(int(width), int(height), int(frames), fps, duration)
