"""What a VACE-style model is conditioned on: source video, mask and reference images, cropped as the clip is.

Metadata columns (all optional): ``source``, a video to start from (a depth or pose rendering, say); ``mask``, a video
or an image, white where the model is to paint; ``reference``, images of what is to appear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mm_trainer.contracts import ClipFiles
from mm_trainer.data.batch import to_pixels


class VaceProcessor:
    """``processor: vace`` of the ``video`` data set, for a model whose ``clip_entries`` name what it adds; no model of
    this package does."""

    columns = ("source", "mask", "reference")
    entries = ("source_video", "mask", "reference_images")

    def group(self, counts: Mapping[str, int]) -> int:
        """The number of reference images: tensors of one micro-batch have one shape."""
        return counts["reference"]

    def process(self, video: Tensor, files: ClipFiles) -> dict[str, Tensor]:
        """The VACE entries of one sample.

        Returns:
            ``mask`` (1, F, H, W) float32, 1 where the model is to paint (everywhere without a mask); ``source_video``
            (3, F, H, W) float32 in [−1, 1]: the source, or without one the clip, grey under the mask;
            ``reference_images`` (R, 3, H, W) float32 in [−1, 1].
        """
        clip = to_pixels(video)
        masks, sources = files.paths("mask"), files.paths("source")
        mask = torch.ones_like(clip[:1])
        if masks:
            mask = (files.read("mask", masks[0])[:1] > 127).float()
        source = to_pixels(files.read("source", sources[0])) if sources else clip * (1 - mask)
        references = [to_pixels(files.read_whole("reference", path)) for path in files.paths("reference")]
        return {
            "source_video": source,
            "mask": mask,
            "reference_images": torch.stack(references) if references else clip.new_zeros(0, 3, *clip.shape[2:]),
        }
