"""Samples that can't be used: what stands in for them, and when there are too many.

The replacement is a function of the sample's key, so every rank that reads this sample, and a resumed run, takes the
same one. A worker never raises for a bad sample: it hands over what it found, and the main process decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.batch import HOST_KEYS, collate
from mm_trainer.data.order import SampleTable
from mm_trainer.errors import BadSample, DataError
from mm_trainer.randomness import seed_generators

logger = logging.getLogger(__name__)

OnBadSample = Literal["replace", "error"]
FEW = 4
"""Bad samples of one rank that say nothing about the share yet, unless the whole data set is small."""
MOST_IN_A_ROW = 32
"""So many replacements may turn out bad, too, before the sample is given up."""


@dataclass(frozen=True)
class Loaded:
    """What a worker hands over for one place of the order."""

    sample: Mapping[str, Any] | None
    """None: nothing usable was found."""
    bad: tuple[tuple[int, str, str], ...]
    """(sample number, where, reason) of every bad sample met on the way."""


class LoadedBatch(NamedTuple):
    """What a worker hands over for one micro-batch; torch pins the tensors in it if asked to."""

    batch: dict[str, Any] | None
    """None: for one of its places nothing usable was found."""
    bad: Sequence[Sequence[tuple[int, str, str]]]
    """As `Loaded.bad`, for each place."""


def join(loaded: Sequence[Loaded]) -> LoadedBatch:
    """Collate the samples of a micro-batch; runs inside the workers."""
    samples = [item.sample for item in loaded if item.sample is not None]
    complete = len(samples) == len(loaded)
    return LoadedBatch(collate(samples) if complete else None, tuple(item.bad for item in loaded))


class SampleReader:
    """Reads a sample, or the one that stands in for it; runs inside the workers.

    Args:
        dataset: the samples.
        table: their buckets; a replacement has the same one.
        seed: the run's seed.
        replace: False hands over the first bad sample as it is.
    """

    def __init__(self, dataset: MapDataset, table: SampleTable, *, seed: int, replace: bool) -> None:
        self.dataset, self.table, self.seed, self.replace = dataset, table, seed, replace

    def __getitem__(self, place: tuple[int, int]) -> Loaded:
        """Read (sample number, sample key)."""
        index, key = place
        bad = []
        for candidate in self._candidates(index, key):
            seed_generators(self.seed, "sample", key)  # for a data set that draws from them
            try:
                sample = self.dataset.load(candidate, key)
            except BadSample as error:
                bad.append((candidate, error.where, error.reason))
                if not self.replace:
                    break
                continue
            if not isinstance(sample, Mapping):
                raise DataError(
                    f"{type(self.dataset).__qualname__}.load must return a mapping of tensors, got a "
                    f"{type(sample).__qualname__}"
                )
            reserved = sorted(HOST_KEYS & sample.keys())
            if reserved:
                raise DataError(f"the data set yields {reserved[0]}, a name that is reserved for ours")
            return Loaded({**sample, "sample_key": key}, tuple(bad))
        return Loaded(None, tuple(bad))

    def _candidates(self, index: int, key: int) -> Iterator[int]:
        """The sample itself, then others of its bucket in an order of its own."""
        yield index
        members: NDArray[np.int64] = np.flatnonzero(self.table.bucket == self.table.bucket[index])
        shuffled = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, key]))).permutation(members)
        yield from (int(other) for other in shuffled[: MOST_IN_A_ROW + 1] if other != index)


class BadSampleLog:
    """Lists each bad sample once, counts them, and stops the run when there are too many.

    Args:
        size: samples in the data set, the ones found bad at opening included.
        data_size: number of data ranks; each reads its own part of the samples in an epoch.
        known: how many were found bad at opening.
        on_bad_sample: ``error`` stops at the first.
        max_fraction: share of bad samples that is still tolerated, see `share`.
    """

    def __init__(
        self, *, size: int, data_size: int, known: int, on_bad_sample: OnBadSample, max_fraction: float
    ) -> None:
        self.size, self.data_size, self.known = size, data_size, known
        self.on_bad_sample, self.max_fraction = on_bad_sample, max_fraction
        self.found: dict[int, tuple[str, str]] = {}
        """Sample number → where the sample is, and what is wrong; a mix has several numbers for one sample."""
        self.read = 0
        """Samples that this rank has read, bad ones included."""
        self.replaced = 0
        """Places of the order in which another sample was used, over the whole run."""

    @property
    def count(self) -> int:
        """Distinct bad samples."""
        return self.known + len({where for where, _ in self.found.values()})

    @property
    def share(self) -> float:
        """Of all samples those found bad at opening, and of what this rank reads (at first its part of an epoch,
        later what it has read) those found since. A part so small that a few bad samples would exceed what is
        tolerated, whatever the true share, is judged as if it were larger."""
        least = math.ceil(FEW / self.max_fraction) if self.max_fraction else 1
        part = min(self.size, max(self.read, -(-self.size // self.data_size), least))
        return self.known / self.size + len(self.found) / part

    def check_opening(self, examples: list[str]) -> None:
        """Judge what opening the data set found.

        Raises:
            DataError: too many, or any with ``on_bad_sample: error``.
        """
        if self.known and self.on_bad_sample == "error":
            raise DataError(f"bad sample with on_bad_sample: error: {'; '.join(examples)}")
        self._check_share(examples)

    def check(self, loaded: LoadedBatch) -> dict[str, Any]:
        """Take note of what a worker found and return the batch.

        Raises:
            DataError: nothing usable was found, too many are bad, or any with ``on_bad_sample: error``.
        """
        met = [event for place in loaded.bad for event in place]
        self.read += len(loaded.bad) + len(met)
        for index, where, reason in met:
            if index not in self.found:
                if all(where != listed for listed, _ in self.found.values()):
                    logger.warning("bad sample: %s: %s", where, reason)
                self.found[index] = where, reason
        examples = [f"{where}: {reason}" for _, where, reason in met]
        if met and self.on_bad_sample == "error":
            raise DataError(f"bad sample with on_bad_sample: error: {examples[0]}")
        if met:
            self._check_share(examples)
        if loaded.batch is None:
            raise DataError(f"no usable sample in its bucket, {len(met)} tried: {'; '.join(examples[:3])}")
        self.replaced += sum(map(bool, loaded.bad))
        return loaded.batch

    def _check_share(self, examples: list[str]) -> None:
        if self.share > self.max_fraction:
            raise DataError(
                f"{self.count} bad samples so far, {self.share:.1%}, more than max_bad_fraction {self.max_fraction}: "
                f"{'; '.join(examples[:3])}"
            )
