"""From samples to a batch, nested entries included, and from the host to the device.

[Note: pixels] In a batch, every uint8 tensor of at least four dims is pixels, of which the last two dims are height and
width; whatever else has as many dims must be of another dtype. Loaders yield them as they are: a quarter of the memory
in the workers, in the batches read ahead and on the way to the device. The model gets float32 in [−1, 1], which
`to_device` makes of them there, in training, validation and the cache alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_trainer.contracts.pipeline import Batch

# The framework's own entries, see `Batch`. The draw of noise and sigma reads them on the host; on the device they would
# cost a synchronisation per batch.
HOST_KEYS = frozenset({"sample_key", "quantile", "sample_weight"})


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack what can be stacked: tensors, arrays and numbers to tensors, mappings entry by entry, the rest to lists.

    Raises:
        ValueError: samples differ in their entries, in a tensor's shape or in a value's type; names the entry.
    """
    return _collate_mappings(samples, path="")


def _collate_mappings(samples: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    names = list(samples[0])
    for sample in samples:
        if set(sample) != set(names):
            raise ValueError(
                f"samples of one batch differ in their entries{path}: {sorted(names)} and {sorted(sample)}"
            )
    return {name: _collate_values([sample[name] for sample in samples], f"{path}.{name}".strip(".")) for name in names}


def _collate_values(values: list[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return _collate_mappings(values, path)
    if isinstance(first, np.ndarray):
        values = [torch.from_numpy(value) for value in values]
    if isinstance(values[0], Tensor):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise ValueError(f"samples of one batch differ in the shape of {path}: {sorted(shapes)}")
        if len({value.dtype for value in values}) > 1:
            raise ValueError(f"samples of one batch differ in the dtype of {path}")
        return torch.stack(values) if len(values) > 1 else values[0].unsqueeze(0)  # without a copy
    if isinstance(first, (bool, int, float)):
        if not all(isinstance(value, (bool, int, float)) for value in values):
            kinds = sorted({type(value).__name__ for value in values})
            raise ValueError(f"samples of one batch differ in the type of {path}: {', '.join(kinds)}")
        return torch.tensor(values)
    return values


def is_pixels(values: Tensor) -> bool:
    """Whether a tensor of a batch is pixels."""
    return values.dtype == torch.uint8 and values.dim() >= 4


def to_pixels(values: Tensor) -> Tensor:
    """(…, H, W) uint8 → float32 in [−1, 1], on the same device."""
    return values.float().mul_(1 / 127.5).sub_(1.0)


def to_device(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Move the tensors, nested ones too, except those that the host reads; bytes become pixels there.

    See [Note: pixels]. What was moved already stays as it is.
    """

    def move(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return to_device(value, device)
        if isinstance(value, Tensor) and key not in HOST_KEYS:
            moved = value.to(device, non_blocking=True)
            return to_pixels(moved) if is_pixels(moved) else moved
        return value

    return {key: move(key, value) for key, value in batch.items()}
