"""What a VACE-style model is conditioned on: source video, mask and reference images, cropped as the clip is.

Metadata columns (all optional): ``source``, a video to start from (a depth or pose rendering, say); ``mask``, a video
or an image, white where the model is to paint; ``reference``, images of what is to appear.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mm_trainer.data.batch import to_pixels
from mm_trainer.data.metadata.table import Table
from mm_trainer.data.video.buckets import Bucket, Crop
from mm_trainer.data.video.reader import read_image, read_still

VACE_COLUMNS = ("source", "mask", "reference")
ReadFrames = Callable[[str, str], NDArray[np.uint8]]
"""(column, path) → (3, F, H, W) RGB, of a video or an image."""


def load_vace(
    table: Table, row: int, video: Tensor, *, read: ReadFrames, read_reference: ReadFrames
) -> dict[str, Tensor]:
    """The VACE entries of one sample.

    Args:
        table: metadata.
        row: of the sample.
        video: (3, F, H, W) float32 in [−1, 1], the clip itself.
        read: reads a file through the clip's view.
        read_reference: reads an image, fitted into the clip's size.

    Returns:
        ``mask`` (1, F, H, W) float32, 1 where the model is to paint (everywhere without a mask); ``source_video``
        (3, F, H, W): the source, or without one the clip, grey under the mask; ``reference_images`` (R, 3, H, W).
    """
    masks, sources = table.paths("mask", row), table.paths("source", row)
    mask = torch.ones_like(video[:1])
    if masks:
        mask = torch.from_numpy(read("mask", masks[0])[:1] > 127).float()
    source = to_pixels(torch.from_numpy(read("source", sources[0]))) if sources else video * (1 - mask)
    references = [
        to_pixels(torch.from_numpy(read_reference("reference", path)[:, 0])) for path in table.paths("reference", row)
    ]
    return {
        "source_video": source,
        "mask": mask,
        "reference_images": torch.stack(references) if references else video.new_zeros(0, 3, *video.shape[2:]),
    }


def read_fitted(path: str, bucket: Bucket) -> NDArray[np.uint8]:
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
