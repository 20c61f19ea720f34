"""Columns of a large table, held so that data workers share them instead of copying them.

A Python list of a million strings is a million objects: its reference counts are written to by every reader, so forked
workers copy page after page. A column here is one or two numpy buffers, which nobody writes to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK = 8192
"""Rows that are Python objects at a time while a table is read; more fall out of the processor's cache."""


@dataclass(frozen=True)
class StringColumn:
    """Strings as one UTF-8 buffer and the end offset of each."""

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @classmethod
    def pack(cls, texts: Sequence[str]) -> StringColumn:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    @classmethod
    def empty(cls, length: int) -> StringColumn:
        """So many empty strings."""
        return cls(np.empty(0, np.uint8), np.zeros(length, np.int64))

    @classmethod
    def join(cls, parts: Sequence[StringColumn]) -> StringColumn:
        offsets = np.cumsum([0, *(len(part.data) for part in parts[:-1])])
        return cls(
            np.concatenate([part.data for part in parts]),
            np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)]),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        return self._bytes(index).decode("utf-8", "surrogateescape")

    def path(self, index: int) -> str:
        """A string as a file name: equal to the text, except where the locale isn't UTF-8."""
        return os.fsdecode(self._bytes(index))

    def _bytes(self, index: int) -> bytes:
        start = int(self.ends[index - 1]) if index else 0
        return self.data[start : int(self.ends[index])].tobytes()
