"""Several data sets as one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.identity import sample_fingerprint
from mm_trainer.data.report import CountsSlowReads, DataReport, Naming, copy_report


class MixedDataset:
    """Data sets side by side, each with its share of an epoch.

    Without weights, an epoch goes ``repeats`` times through each data set. With
    weights, the shares of the epoch's samples are in their ratio, and the epoch is as long as it takes for no data set
    to be cut: the one that is largest for its weight goes through ``repeats`` times, the others more often (the last
    time perhaps only in part, from its start).

    Buckets of two data sets are one if they are equal and the samples have the same entries: data sets of one mix must
    yield the same entries.

    Args:
        datasets: what is mixed.
        repeats: passes of each in an epoch.
        weights: relative shares; None: none are given.
    """

    def __init__(
        self, datasets: Sequence[MapDataset], *, repeats: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        self.datasets = list(datasets)
        counts = np.array([len(data) * times for data, times in zip(datasets, repeats, strict=True)], dtype=np.int64)
        if weights is not None:
            shares = np.asarray(weights, dtype=np.float64)
            counts = np.round((counts / shares).max() * shares).astype(np.int64)
        self._ends = np.cumsum(counts)
        self.report = _merge_reports(self.datasets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def bucket(self, index: int) -> Hashable:
        dataset, inner = self._locate(index)
        return dataset.bucket(inner)

    def tokens(self, index: int) -> int:
        dataset, inner = self._locate(index)
        return dataset.tokens(inner)

    def load(self, index: int, sample_key: int) -> Mapping[str, Any]:
        dataset, inner = self._locate(index)
        return dataset.load(inner, sample_key)

    def name(self, index: int) -> str:
        """The inner data set's, if it has names."""
        which, inner = self._place(index)
        dataset = self.datasets[which]
        return dataset.name(inner) if isinstance(dataset, Naming) else f"sample {inner} of data set {which}"

    @property
    def slow_reads(self) -> int:
        """Of all that count them."""
        return sum(data.slow_reads for data in self.datasets if isinstance(data, CountsSlowReads))

    def fingerprint(self, index: int) -> str:
        """The inner data set's, and which one that is: each has settings of its own. A repeated sample is one."""
        which, inner = self._place(index)
        return f"{which}-{sample_fingerprint(self.datasets[which], inner)}"

    def _locate(self, index: int) -> tuple[MapDataset, int]:
        which, inner = self._place(index)
        return self.datasets[which], inner

    def _place(self, index: int) -> tuple[int, int]:
        """Number of the data set, and the sample's place in it."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[which - 1]) if which else 0
        return which, (index - start) % len(self.datasets[which])


def _merge_reports(datasets: Sequence[MapDataset]) -> DataReport:
    merged = DataReport(rows=0)
    for data in datasets:
        report = copy_report(data)
        merged.rows += report.rows
        for entry in report.skipped.values():
            merged.absorb(entry)
    return merged
