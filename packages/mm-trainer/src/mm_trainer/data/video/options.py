"""The keys of ``data.dataset_param`` with ``dataset_type: video``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from mm_trainer import registry
from mm_trainer.contracts.spec import InputSpec, Options
from mm_trainer.data.metadata.folder import MissingCaptions
from mm_trainer.data.video.buckets import Bucket, BudgetBuckets, FixedBuckets, check_bucket, parse_buckets
from mm_trainer.data.video.captions import TextCleaning
from mm_trainer.data.video.colour import Hdr
from mm_trainer.errors import DataError, FieldError, PluginError

Probability = Annotated[float, Field(ge=0, le=1)]


class VideoOptions(Options):
    """``data.dataset_param`` with ``dataset_type: video``."""

    data_path: Path
    """Metadata: a file or folder that `read_table` knows."""
    data_folder: Path | None = None
    """What relative paths in the metadata count from; default: the metadata's folder."""
    num_frames: Annotated[int, Field(ge=1)] | None = None
    """Frames of a clip, for buckets that don't say and for ``max_pixels``."""
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 16.0
    """Clips are read at this rate; null: each at its own average rate."""
    buckets: tuple[tuple[int, ...], ...] | None = None
    """``[height, width]`` or ``[frames, height, width]`` each."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Instead of buckets: height × width of the largest ones to make."""
    aspect_tolerance: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """With ``max_pixels``: the share of a side that may be cropped to keep the number of buckets small."""
    short_clips: Literal["skip", "floor"] = "skip"
    """What becomes of clips shorter than every bucket: left out, or a bucket of their own length."""
    clip_start: Literal["first", "random"] = "first"
    """Where in a long clip the frames are taken."""
    crop: Literal["center", "random"] = "center"
    flip: Probability = 0.0
    """Probability of mirroring a clip left to right."""
    caption_dropout: Probability = 0.0
    """Probability of an empty caption."""
    hdr: Hdr = "tonemap"
    """HDR clips are shown as SDR, are bad samples (skip), or stop the run (error)."""
    missing_captions: MissingCaptions = "error"
    """What becomes of clips in a folder that have no caption file: an error, an empty caption, or left out."""
    clean_text: TextCleaning | None = None
    """Cleaning before the model's own tokenise step; see `mm_trainer.data.video.captions`."""
    processor: str | None = None
    """Name in the entry-point group mm_trainer.clip_processors: adds a model family's own entries to each sample."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["aspect_tolerance"].default
        if self.buckets is not None and self.aspect_tolerance != default:
            raise FieldError("aspect_tolerance", "only read with max_pixels, and buckets are given")
        return self

    @field_validator("processor")
    @classmethod
    def _is_installed(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                registry.find(registry.CLIP_PROCESSORS, name)
            except PluginError as error:
                raise ValueError(str(error)) from error
        return name


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
    return BudgetBuckets(options.num_frames, options.max_pixels, options.aspect_tolerance, unit)
