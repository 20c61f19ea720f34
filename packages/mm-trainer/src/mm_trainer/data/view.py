"""The part of a clip that one sample uses, in time and space, and reading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mm_trainer.data.reader import is_image, read_frames, read_image, resize
from mm_trainer.data.shaping import Bucket, Crop


@dataclass(frozen=True)
class View:
    """What is cut out of a clip; all files of one sample (video, mask, …) are read through the same view."""

    bucket: Bucket
    crop: Crop
    times: tuple[float, ...]
    """Seconds from the file's start, one per frame."""
    flip: bool
    """Mirrored left to right."""


def read_view(path: str | Path, view: View) -> NDArray[np.uint8]:
    """The view of a video, or of an image that is shown throughout, as (F, H, W, 3) RGB.

    Raises:
        MediaError: the file can't be read.
    """
    crop, bucket = view.crop, view.bucket
    if is_image(path):
        image = resize(read_image(path), height=crop.height, width=crop.width)
        frames = np.broadcast_to(image, (bucket.frames, *image.shape))
    else:
        frames = read_frames(path, view.times, height=crop.height, width=crop.width)
    frames = frames[:, crop.top : crop.top + bucket.height, crop.left : crop.left + bucket.width]
    return frames[:, :, ::-1] if view.flip else frames


def to_pixels(frames: NDArray[np.uint8]) -> Tensor:
    """(F, H, W, 3) uint8 → (3, F, H, W) float32 in [−1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(3, 0, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1.0)
