"""`VideoDataset`: clips and images from files, with captions from a metadata table."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from mm_trainer import registry
from mm_trainer.contracts.clips import ClipProcessor
from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.identity import clip_digest
from mm_trainer.data.metadata.formats import read_table
from mm_trainer.data.report import DataReport
from mm_trainer.data.video.buckets import Bucket, cover, floor_frames
from mm_trainer.data.video.captions import clean, draw_caption
from mm_trainer.data.video.clips import ClipIndex
from mm_trainer.data.video.options import VideoOptions, make_chooser
from mm_trainer.data.video.reader import MediaError, MediaInfo
from mm_trainer.data.video.view import View, read_fitted, read_view
from mm_trainer.errors import BadSample, DataError
from mm_trainer.randomness import keyed_generator

logger = logging.getLogger(__name__)


class VideoDataset:
    """Clips shaped into buckets.

    A sample is ``video`` (3, F, H, W) uint8 RGB (see [Note: pixels] in `mm_trainer.data.batch`), ``caption`` (text)
    and, if the model reads text, ``prompt_ids`` and ``prompt_mask`` (L,) int64. With a ``processor``,
    also what that one adds.

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
        self.slow_reads = 0
        """Files that were decoded from their start, in this process."""
        if context.tokenizer is None and context.input_spec.text_length is not None:
            raise DataError("dataset_param: the model reads text, so a tokenizer must be named")
        name = self.options.processor
        self.processor: ClipProcessor | None = None if name is None else registry.load_clip_processor(name)
        self.table = read_table(
            self.options.data_path,
            require_caption=context.tokenizer is not None,
            paths=self._columns,
            missing_captions=self.options.missing_captions,
        )
        self._check_captions()
        path = self.options.data_path
        self.folder = self.options.data_folder or (path if path.is_dir() else path.parent)
        self.report = DataReport(rows=len(self.table))
        self._assign_buckets(ClipIndex.build(self.table, self.folder, self.report))
        for line in self.report.lines():
            logger.warning("%s: %s", path, line)
        if len(self) == 0:
            raise DataError(f"{path}: nothing usable: {'; '.join(self.report.lines())}")
        self._log_retiming()

    @staticmethod
    def check_input_spec(params: Mapping[str, Any], input_spec: InputSpec) -> None:
        """Refuse keys that ask for what the models can't take, before anything is opened.

        Raises:
            DataError: no tokenizer for a model that reads text; sizes, with the nearest that fit.
        """
        if input_spec.text_length is not None and params.get("tokenizer") is None:
            raise DataError("dataset_param.tokenizer: the model reads text, so a tokenizer must be named")
        known = {name: value for name, value in params.items() if name in VideoOptions.model_fields}
        options = VideoOptions.model_validate(known)
        make_chooser(options, input_spec)
        if options.processor is not None:
            registry.load_clip_processor(options.processor)

    @staticmethod
    def optional_entries(params: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Option → entries of a sample that it adds for a model which declares that it reads them."""
        name = params.get("processor")
        return {} if name is None else {"processor": tuple(registry.load_clip_processor(name).entries)}

    @property
    def _columns(self) -> tuple[str, ...]:
        """Further columns of paths."""
        return () if self.processor is None else tuple(self.processor.columns)

    def _check_captions(self) -> None:
        """Refuse what is to be done with captions where there are none."""
        if "caption" in self.table.texts:
            return
        for name in ("caption_dropout", "clean_text"):
            if getattr(self.options, name):
                raise DataError(f"dataset_param.{name}: {self.options.data_path} has no captions, so it isn't read")

    def _assign_buckets(self, clips: ClipIndex) -> None:
        chooser, spec = make_chooser(self.options, self.context.input_spec), self.context.input_spec

        def choose(info: MediaInfo, frames: int) -> Bucket | None:
            bucket = chooser.choose(frames=frames, height=info.height, width=info.width)
            if bucket is None and self.options.short_clips == "floor" and frames > 0:
                shortest = chooser.choose(frames=chooser.shortest, height=info.height, width=info.width)
                bucket = shortest and shortest._replace(frames=floor_frames(frames, spec))
            return bucket

        buckets = clips.assign(choose, self.options.fps)
        number: dict[Bucket | None, int] = {None: -1}
        assigned = np.fromiter((number.setdefault(bucket, len(number) - 1) for bucket in buckets), np.int32)
        for clip in np.flatnonzero(assigned < 0).tolist():
            where = f"{self.table.media(int(clips.row[clip]))} ({clips.available(clip, self.options.fps)} frames)"
            self.report.skip(where, f"too short for {chooser.shortest} frames", bad=False)
        usable = np.flatnonzero(assigned >= 0)
        self.clips, self._bucket_number = clips.take(usable), assigned[usable]
        self._buckets = [bucket for bucket in number if bucket is not None]
        self._tokens = [spec.tokens(*bucket) for bucket in self._buckets]

    def _log_retiming(self) -> None:
        """Say once per source rate that clips are read at another one."""
        if self.options.fps is None:
            return
        rates, clips, counts = np.unique(np.round(self.clips.fps, 3), return_index=True, return_counts=True)
        for rate, clip, count in zip(rates.tolist(), clips.tolist(), counts.tolist(), strict=True):
            if rate not in (0.0, self.options.fps):
                info, name = self.clips.info(clip), self.table.media(int(self.clips.row[clip]))
                given, fps = info.frames_at(self.options.fps), self.options.fps
                logger.info(
                    "%d clips retimed, as %s: source %d @ %g -> %d @ %g", count, name, info.frames, rate, given, fps
                )

    def __len__(self) -> int:
        return len(self.clips)

    def bucket(self, index: int) -> tuple[Any, ...]:
        """The clip's shape, and what the processor needs to be equal within a micro-batch."""
        bucket = self._buckets[self._bucket_number[index]]
        if self.processor is None:
            return bucket
        row = int(self.clips.row[index])
        return (*bucket, self.processor.group({name: len(self.table.paths(name, row)) for name in self._columns}))

    def name(self, index: int) -> str:
        """The file, as the metadata has it."""
        return self.table.media(int(self.clips.row[index]))

    def tokens(self, index: int) -> int:
        return self._tokens[self._bucket_number[index]]

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        """Read one clip; see the class for what a sample holds.

        Raises:
            BadSample: a file can't be read.
        """
        row, info = int(self.clips.row[index]), self.clips.info(index)
        files = _SampleFiles(self, row, self._draw_view(index, sample_key))
        video = files.read("media", self.table.media(row), aspect=info.width / info.height)
        sample: dict[str, Any] = {"video": video, "caption": self._caption(row, sample_key)}
        if self.context.tokenizer is not None:
            tokens = self.context.tokenizer([sample["caption"]])
            sample |= {name: values[0] for name, values in tokens.items()}
        if self.processor is not None:
            added = self.processor.process(video, files)
            if set(added) != set(self.processor.entries):
                name, stated = self.options.processor, sorted(self.processor.entries)
                raise DataError(f"processor {name}: added {sorted(added)}, but its entries are {stated}")
            sample |= added
        return sample

    def fingerprint(self, index: int) -> str:
        """Digest of what a sample is made from: its row of the metadata, and its files' sizes, heads and tails."""
        row = int(self.clips.row[index])
        names = [self.table.media(row), *(path for column in self._columns for path in self.table.paths(column, row))]
        words = [*names, *self.table.captions(row), *(str(values[row]) for values in self.table.numbers.values())]
        digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=16)
        for name in names:
            digest.update(clip_digest(os.path.join(self.folder, name)))
        return digest.hexdigest()

    def _draw_view(self, index: int, sample_key: int) -> View:
        """Start, crop and flip of one sample, drawn from its key."""
        generator = keyed_generator(self.context.seed, "augmentation", sample_key)
        start, across, down, flip = torch.rand(4, generator=generator).tolist()
        if self.options.crop == "center":
            across = down = 0.5
        info, bucket = self.clips.info(index), self._buckets[self._bucket_number[index]]
        rate, first = self.options.fps or info.fps or 1.0, float(self.clips.first[index])
        spare = self.clips.available(index, self.options.fps) - bucket.frames
        if self.options.clip_start == "random" and spare > 0:
            first += math.floor(start * (spare + 1)) / rate
        return View(
            bucket=bucket,
            crop=cover(bucket, height=info.height, width=info.width, across=across, down=down),
            times=tuple(first + number / rate for number in range(bucket.frames)),
            flip=flip < self.options.flip,
            hdr=self.options.hdr,
        )

    def _caption(self, row: int, sample_key: int) -> str:
        dropped, choice = draw_caption(self.context.seed, sample_key)
        captions = self.table.captions(row)
        if dropped < self.options.caption_dropout:
            return ""
        return clean(captions[int(choice * len(captions))], self.options.clean_text)


@dataclass(frozen=True)
class _SampleFiles:
    """The files of one sample, read through its view (a `ClipFiles`)."""

    dataset: VideoDataset
    row: int
    view: View

    def paths(self, column: str) -> list[str]:
        return self.dataset.table.paths(column, self.row)

    def read(self, column: str, path: str, *, aspect: float | None = None) -> Tensor:
        return self._read(column, path, lambda file: read_view(file, self.view, aspect=aspect, on_slow=self._count))

    def _count(self) -> None:
        self.dataset.slow_reads += 1

    def read_whole(self, column: str, path: str) -> Tensor:
        return self._read(column, path, lambda file: read_fitted(file, self.view.bucket))[:, 0]

    def _read(self, column: str, path: str, reader: Callable[[str], NDArray[np.uint8]]) -> Tensor:
        file = os.path.join(self.dataset.folder, path)
        try:
            return torch.from_numpy(reader(file))
        except MediaError as error:
            raise BadSample(f"{self.dataset.table.where(self.row, column)}: {file}", str(error)) from error
        except DataError as error:
            raise DataError(f"{self.dataset.table.where(self.row, column)}: {file}: {error}") from error
