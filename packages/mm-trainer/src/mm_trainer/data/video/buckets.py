"""Which size a clip is brought to: buckets, and the resize and crop that lead into one.

Rules, all checked when the data set is opened:

- A bucket is (frames, height, width). Frames are ``stride·k + 1``, sides multiples of what the models ask for; other
  numbers are refused with the nearest that fit.
- A clip goes into the longest bucket that it fills; among those, to the nearest aspect ratio; among those, to the
  largest that doesn't enlarge it, or else to the smallest.
- A clip shorter than the shortest bucket is left out and counted (``short_clips: skip``) or, with
  ``short_clips: floor``, gets a bucket of the largest ``stride·k + 1`` frames that it fills.
- The frame is resized to cover the bucket with its aspect kept, and what stands out is cropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mm_trainer.contracts.spec import InputSpec
from mm_trainer.errors import DataError


class Bucket(NamedTuple):
    """Shape of a clip after shaping, in frames and pixels."""

    frames: int
    height: int
    width: int


class Crop(NamedTuple):
    """How a frame is brought into a bucket: the whole is resized, then a part is kept."""

    height: int
    """Of the whole after resizing, in pixels."""
    width: int
    top: int
    """Where the part begins."""
    left: int
    kept_height: int
    kept_width: int


def check_bucket(bucket: Bucket, spec: InputSpec) -> Bucket:
    """Return the bucket if the models can take it.

    Raises:
        DataError: with the nearest numbers that fit.
    """
    if (bucket.frames - 1) % spec.frame_stride or bucket.frames < 1:
        raise DataError(
            f"{bucket.frames} frames don't fit the model, which takes {spec.frame_stride}·k + 1: "
            f"nearest {_nearest(bucket.frames - 1, spec.frame_stride, plus=1)}"
        )
    for name, side in (("height", bucket.height), ("width", bucket.width)):
        if side % spec.spatial_multiple or side < 1:
            raise DataError(
                f"{name} {side} doesn't fit the model, which takes multiples of {spec.spatial_multiple}: "
                f"nearest {_nearest(side, spec.spatial_multiple)}"
            )
    return bucket


def _nearest(value: int, step: int, plus: int = 0) -> str:
    low = max(0, value // step * step)
    candidates = [low + plus, low + step + plus]
    return " or ".join(str(candidate) for candidate in candidates if candidate > 0)


@dataclass(frozen=True)
class FixedBuckets:
    """Buckets that the configuration lists."""

    buckets: tuple[Bucket, ...]

    @property
    def shortest(self) -> int:
        """Frames of the shortest bucket."""
        return min(bucket.frames for bucket in self.buckets)

    def choose(self, *, frames: int, height: int, width: int) -> Bucket | None:
        """The bucket of a clip of this many frames at the target rate; None if it is too short for any."""
        fitting = [bucket for bucket in self.buckets if bucket.frames <= frames]
        if not fitting:
            return None
        aspect = math.log(width / height)

        def rank(bucket: Bucket) -> tuple[float, ...]:
            area = bucket.height * bucket.width
            enlarges = area > height * width
            off = abs(math.log(bucket.width / bucket.height) - aspect)
            return (-bucket.frames, round(off, 6), enlarges, area if enlarges else -area)

        return min(fitting, key=rank)


@dataclass(frozen=True)
class BudgetBuckets:
    """Buckets made from a budget of pixels per frame.

    Aspects are quantised so that no more than ``aspect_tolerance`` of a side is cropped (before rounding to the
    model's multiple). A clip with fewer pixels than the budget goes to the next halving of it that it fills.

    Args:
        frames: the length of every bucket.
        max_pixels: height × width may not exceed this.
        aspect_tolerance: largest share of a side that is cropped away.
        multiple: what both sides must be multiples of.
    """

    frames: int
    max_pixels: int
    aspect_tolerance: float
    multiple: int

    @property
    def shortest(self) -> int:
        """As `FixedBuckets.shortest`."""
        return self.frames

    def choose(self, *, frames: int, height: int, width: int) -> Bucket | None:
        """As `FixedBuckets.choose`."""
        if frames < self.frames:
            return None
        budget = self.max_pixels
        while budget > height * width and budget >= 2 * self.multiple**2:
            budget //= 2
        step = -2 * math.log1p(-self.aspect_tolerance)
        aspect = math.exp(round(math.log(width / height) / step) * step)
        return Bucket(self.frames, *self._sides(budget, aspect))

    def _sides(self, budget: int, aspect: float) -> tuple[int, int]:
        """(height, width) in multiples within the budget, nearest to the aspect, then largest."""
        unit = self.multiple
        best: tuple[float, int, int, int] = (math.inf, 0, unit, unit)
        ideal = math.sqrt(budget / aspect) / unit
        for rows in {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}:
            most = max(1, budget // (rows * unit * unit))
            columns = min(most, max(1, round(rows * aspect)))
            off = abs(math.log(columns / rows / aspect))
            best = min(best, (off, -rows * columns, rows * unit, columns * unit))
        return best[2], best[3]


def floor_frames(frames: int, spec: InputSpec) -> int:
    """The largest number of frames that the models take and a clip of ``frames`` fills."""
    return (frames - 1) // spec.frame_stride * spec.frame_stride + 1


def cover(bucket: Bucket, *, height: int, width: int, across: float = 0.5, down: float = 0.5) -> Crop:
    """Resize and crop that bring a source of (height, width) into a bucket with the aspect kept.

    Args:
        bucket: the target.
        height: of the source.
        width: of the source.
        across: where the crop lies horizontally, 0 = left, 0.5 = centre, 1 = right.
        down: where it lies vertically, 0 = top.
    """
    scale = max(bucket.height / height, bucket.width / width)
    tall, wide = max(bucket.height, round(height * scale)), max(bucket.width, round(width * scale))
    top, left = round((tall - bucket.height) * down), round((wide - bucket.width) * across)
    return Crop(tall, wide, top, left, bucket.height, bucket.width)


def parse_buckets(entries: Iterable[Sequence[int]], num_frames: int | None) -> tuple[Bucket, ...]:
    """Buckets from ``[height, width]`` (with ``num_frames``) and ``[frames, height, width]`` entries."""
    buckets = []
    for entry in entries:
        if len(entry) == 3:
            buckets.append(Bucket(*entry))
        elif len(entry) == 2 and num_frames is not None:
            buckets.append(Bucket(num_frames, *entry))
        else:
            raise DataError(
                f"bucket {list(entry)}: expected [frames, height, width], or [height, width] and num_frames"
            )
    return tuple(dict.fromkeys(buckets))
