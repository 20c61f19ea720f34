"""The part of a clip that one sample uses, in time and space, and reading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.video.buckets import Bucket, Crop
from mm_trainer.data.video.colour import Hdr
from mm_trainer.data.video.reader import check_aspect, is_image, read_frames, read_image, read_still


@dataclass(frozen=True)
class View:
    """What is cut out of a clip; all files of one sample (video, mask, …) are read through the same view."""

    bucket: Bucket
    crop: Crop
    times: tuple[float, ...]
    """Seconds from the file's start, one per frame."""
    flip: bool
    """Mirrored left to right."""
    hdr: Hdr = "tonemap"
    """What becomes of HDR."""


def read_view(
    path: str | Path, view: View, *, aspect: float | None = None, on_slow: Callable[[], None] | None = None
) -> NDArray[np.uint8]:
    """The view of a video, or of an image that is shown throughout, as (3, F, H, W) RGB.

    Args:
        path: the file.
        view: what to read of it.
        aspect: width over height according to the metadata; None: not compared.
        on_slow: see `read_frames`.

    Raises:
        MediaError: the file can't be read, or its ``aspect`` (width over height) is not that of the metadata.
    """
    if is_image(path):
        image = read_image(path)
        if aspect is not None:
            check_aspect(image.shape[0], image.shape[1], aspect)
        frames = np.repeat(read_still(image, view.crop), len(view.times), axis=1)
    else:
        frames = read_frames(path, view.times, view.crop, aspect=aspect, hdr=view.hdr, on_slow=on_slow)
    return np.ascontiguousarray(frames[..., ::-1]) if view.flip else frames


def read_fitted(path: str | Path, bucket: Bucket) -> NDArray[np.uint8]:
    """An image as one frame (3, 1, H, W): whole, its aspect kept, in the middle of a white canvas.

    Raises:
        MediaError: the file can't be read.
    """
    image = read_image(path)
    scale = min(bucket.height / image.shape[0], bucket.width / image.shape[1])
    height, width = max(1, round(image.shape[0] * scale)), max(1, round(image.shape[1] * scale))
    top, left = (bucket.height - height) // 2, (bucket.width - width) // 2
    canvas = np.full((3, 1, bucket.height, bucket.width), 255, dtype=np.uint8)
    whole = Crop(height, width, top=0, left=0, kept_height=height, kept_width=width)
    canvas[:, :, top : top + height, left : left + width] = read_still(image, whole)
    return canvas
