"""Pixels are bytes until they are on the device.

[Note: pixels] In a batch, every uint8 tensor of at least four dims is pixels, of which the last two dims are height and
width; whatever else has as many dims must be of another dtype. Loaders yield them as they are: a quarter of the memory
in the workers, in the batches read ahead and on the way to the device. The model gets float32 in [−1, 1], which
`mm_trainer.engine.engine.to_device` makes of them there, in training, validation and the cache alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_pixels(values: Tensor) -> bool:
    """Whether a tensor of a batch is pixels."""
    return values.dtype == torch.uint8 and values.dim() >= 4


def to_pixels(values: Tensor) -> Tensor:
    """(…, H, W) uint8 → float32 in [−1, 1], on the same device."""
    return values.float().mul_(1 / 127.5).sub_(1.0)
