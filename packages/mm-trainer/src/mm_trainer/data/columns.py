"""Columns of a large table, held so that data workers share them instead of copying them.

A Python list of a million strings is a million objects: its reference counts are written to by every reader, so forked
workers copy page after page. A column here is one or two numpy buffers, which nobody writes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK = 65536


@dataclass(frozen=True)
class StringColumn:
    """Strings as one UTF-8 buffer and the end offset of each."""

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @classmethod
    def build(cls, chunks: Iterable[Sequence[str]]) -> StringColumn:
        """Pack strings that come in chunks, so that only one chunk at a time exists as Python objects."""
        buffers: list[NDArray[np.uint8]] = []
        ends: list[NDArray[np.int64]] = []
        total = 0
        for chunk in chunks:
            encoded = [text.encode("utf-8", "surrogateescape") for text in chunk]
            lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
            ends.append(np.cumsum(lengths) + total)
            total += int(lengths.sum())
            buffers.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
        if not buffers:
            return cls(np.empty(0, np.uint8), np.empty(0, np.int64))
        return cls(np.concatenate(buffers), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.data[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def take(self, rows: NDArray[np.int64]) -> StringColumn:
        """The column of the given rows, in their order."""
        return StringColumn.build(
            [self[int(row)] for row in rows[start : start + CHUNK]] for start in range(0, len(rows), CHUNK)
        )
