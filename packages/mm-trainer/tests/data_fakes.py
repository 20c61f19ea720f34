"""A data set of numbers for tests of order and loading: no files, but with buckets, costs and bad samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mm_trainer.errors import BadSample


class NumberDataset:
    """Sample i is the number i.

    Args:
        buckets: one per sample.
        tokens: one per sample; default: 1 each.
        bad: sample numbers that can't be read.
    """

    def __init__(self, buckets: Sequence[int], tokens: Sequence[int] | None = None, bad: Sequence[int] = ()) -> None:
        self.buckets, self.costs, self.bad = list(buckets), list(tokens or [1] * len(buckets)), set(bad)
        self.loads = 0

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket(self, index: int) -> int:
        return self.buckets[index]

    def tokens(self, index: int) -> int:
        return self.costs[index]

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        self.loads += 1
        if index in self.bad:
            raise BadSample(f"sample {index}", "broken")
        return {"number": torch.tensor(index), "bucket": self.buckets[index]}
