"""Boxes: rectangular parts of tensors, as offsets and sizes per dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple


class Box(NamedTuple):
    """The part ``[offset, offset + size)`` of every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box (1 for a box without dimensions)."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is none."""
        offsets, sizes = [], []
        for start, size, other_start, other_size in zip(*self, *other, strict=True):
            low, high = max(start, other_start), min(start + size, other_start + other_size)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def moved(self, delta: Sequence[int]) -> Box:
        """The same sizes, ``delta`` further."""
        return Box(tuple(o + d for o, d in zip(self.offsets, delta, strict=True)), self.sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box counted from ``origin``."""
        return self.moved([-o for o in origin])

    def permuted(self, dims: Sequence[int]) -> Box:
        """The box after ``tensor.permute(dims)``."""
        return Box(tuple(self.offsets[d] for d in dims), tuple(self.sizes[d] for d in dims))

    @property
    def slices(self) -> tuple[slice, ...]:
        """For indexing a tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def pieces(self, max_numel: int) -> Iterator[Box]:
        """Cut into boxes of at most ``max_numel`` elements, in row-major order."""
        if self.numel == 0:
            return
        if self.numel <= max_numel or not self.sizes:
            yield self
            return
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        step = max(1, max_numel * self.sizes[dim] // self.numel)
        for start in range(0, self.sizes[dim], step):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dim] += start
            sizes[dim] = min(step, self.sizes[dim] - start)
            yield from Box(tuple(offsets), tuple(sizes)).pieces(max_numel)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """The contiguous runs ``(first element, count)`` of ``box`` in a row-major tensor of ``shape``, in order."""
    if box.numel == 0:
        return
    # Trailing dimensions that are taken whole merge into one run with the dimension before them.
    inner = len(shape)
    while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    count = math.prod(box.sizes[inner:])
    for index in product(*(range(size) for size in box.sizes[:inner])):
        yield start + sum(i * s for i, s in zip(index, strides, strict=False)), count
