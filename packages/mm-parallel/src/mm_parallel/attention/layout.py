"""Which tokens each rank of a context-parallel group holds; pure arithmetic, no torch.

A sequence is padded at its end to ``padded`` tokens and cut into ``ring`` chunks, and each chunk into ``ulysses``
parts: rank ``ring_index × ulysses + ulysses_index`` holds one part. In plain order, chunk i is the i-th run of
tokens. In zigzag order, which gives every rank equal work under a causal mask, the sequence is cut into
``2 × ring`` runs and chunk i is run i followed by run ``2 × ring - 1 - i``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive tokens: ``global_start, global_start + 1, …`` are at ``local_start, local_start + 1, …``."""

    rank: int
    global_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class SequenceLayout:
    """The cut of one sequence.

    Args:
        length: tokens, without padding.
        ulysses: parts of a chunk.
        ring: chunks.
        zigzag: the order of runs in chunks; only for ``ring > 1``.
    """

    length: int
    ulysses: int
    ring: int
    zigzag: bool

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"expected a sequence of at least 1 token, got {self.length}")

    @property
    def size(self) -> int:
        return self.ulysses * self.ring

    @cached_property
    def padded(self) -> int:
        """The smallest length that every cut divides."""
        unit = self.ring * math.lcm(2, self.ulysses) if self.zigzag else self.size
        return -(-self.length // unit) * unit

    @property
    def chunk(self) -> int:
        """Tokens of one ring chunk, padding included."""
        return self.padded // self.ring

    @property
    def local(self) -> int:
        """Tokens of one rank, padding included."""
        return self.padded // self.size

    def valid_in_chunk(self, chunk: int) -> int:
        """Tokens of a plain chunk that aren't padding; they come first."""
        return min(max(self.length - chunk * self.chunk, 0), self.chunk)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs of real tokens, in the order of the sequence."""
        found = []
        for rank in range(self.size):
            local_start = 0
            for start, length in self._runs_with_padding(rank):
                real = min(length, self.length - start)
                if real > 0:
                    found.append(Run(rank, start, local_start, real))
                local_start += length
        return tuple(sorted(found, key=lambda run: run.global_start))

    def runs_of(self, rank: int) -> list[Run]:
        """The rank's runs of real tokens, in local order (which is also the order of the sequence)."""
        return [run for run in self.runs if run.rank == rank]

    def _runs_with_padding(self, rank: int) -> list[tuple[int, int]]:
        """(global start, length) of the rank's runs, padding positions included."""
        chunk, part = divmod(rank, self.ulysses)
        start, stop = part * self.local, (part + 1) * self.local  # within the chunk
        if not self.zigzag:
            return [(chunk * self.chunk + start, stop - start)]
        half = self.chunk // 2
        first, second = chunk * half, (2 * self.ring - 1 - chunk) * half
        runs = []
        if start < half:
            runs.append((first + start, min(stop, half) - start))
        if stop > half:
            begin = max(start, half)
            runs.append((second + begin - half, stop - begin))
        return runs
