"""A data set without files: squares of four colours that move right."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from mm_trainer.contracts import DatasetContext, Options
from mm_trainer.randomness import keyed_generator


class SquaresOptions(Options):
    """Keys of ``data.dataset_param``."""

    samples: int = 16
    frames: int = 3
    size: int = 8


class MovingSquares:
    """Sample i shows a square of colour i mod 4; its height is drawn anew each time the sample comes up."""

    Options = SquaresOptions

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        self.options = SquaresOptions.model_validate(config)
        self._context = context

    def __len__(self) -> int:
        return self.options.samples

    def bucket(self, index: int) -> Hashable:
        return self.options.frames, self.options.size, self.options.size

    def tokens(self, index: int) -> int:
        return self._context.input_spec.tokens(self.options.frames, self.options.size, self.options.size)

    def load(self, index: int, sample_key: int) -> dict[str, Tensor]:
        frames, size = self.options.frames, self.options.size
        generator = keyed_generator(self._context.seed, "square", sample_key)
        top = int(torch.randint(0, size - 2, (), generator=generator))
        video = -torch.ones(3, frames, size, size)
        for frame in range(frames):
            left = (index + frame) % (size - 2)
            video[index % 3, frame, top : top + 2, left : left + 2] = 1.0
        return {
            "video": video,
            "prompt_ids": torch.tensor([index % 4, 0, 0, 0]),
            "prompt_mask": torch.tensor([1, 0, 0, 0]),
        }
