"""From samples to a batch, nested entries included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack what can be stacked: tensors, arrays and numbers to tensors, mappings entry by entry, the rest to lists.

    Raises:
        ValueError: samples differ in their entries or in a tensor's shape; names the entry.
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
        return torch.tensor(values)
    return values
