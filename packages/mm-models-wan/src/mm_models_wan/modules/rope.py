"""Rotary position embedding over (frame, height, width).

Of the ``d`` real dims of a head, height and width get ``2·(d//6)`` each and frames the rest; each axis rotates adjacent
pairs with base 10000 (Su et al., "RoFormer", 2021, applied per axis).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

THETA = 10000.0

Grid = tuple[int, int, int]
"""Tokens along (frame, height, width); token order is frames outermost, width innermost."""


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Real dims of a head for (frame, height, width); they add up to ``head_dim``."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


class RotaryTables:
    """Cosine and sine of every token's angles, made once per grid and device.

    [Note: rotary tables] They are a function of the grid alone, so they aren't buffers of the model: there is nothing
    for a meta build to lose, for a cast to round or for a checkpoint to hold. One model keeps the tables of its last
    ``capacity`` grids, since a run with buckets returns to the same few shapes.

    Args:
        head_dim: real dims of a head.
        max_length: positions that an axis may have.
    """

    def __init__(self, head_dim: int, max_length: int, *, capacity: int = 16) -> None:
        self.head_dim, self.max_length, self.capacity = head_dim, max_length, capacity
        self._kept: OrderedDict[tuple[Grid, torch.device], tuple[Tensor, Tensor]] = OrderedDict()

    def __call__(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two (1, tokens, 1, head_dim / 2) float32 tensors, one column per rotated pair.

        Raises:
            ValueError: an axis is longer than ``max_length``.
        """
        key = (grid, device)
        if key not in self._kept:
            if max(grid) > self.max_length:
                raise ValueError(
                    f"a grid of {grid} tokens exceeds the rotary table's {self.max_length} positions per axis"
                )
            self._kept[key] = self._make(grid, device)
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _make(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
        # A table made under inference mode could not be saved for a later backward. Made on the CPU: not every device
        # has float64.
        with torch.inference_mode(False), torch.no_grad():
            columns = []
            for axis, (length, dims) in enumerate(zip(grid, axis_dims(self.head_dim), strict=True)):
                frequency = THETA ** -(torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims)
                angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
                view = [1, 1, 1, angle.shape[1]]
                view[axis] = length
                columns.append(angle.view(view).expand(*grid, angle.shape[1]))
            angles = torch.cat(columns, dim=-1).reshape(1, -1, 1, self.head_dim // 2)
            return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)
