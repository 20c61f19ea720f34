"""Which samples make up which step: a function of (seed, epoch) and the shape of a step, nothing else.

[Note: global data order]
1. The samples are shuffled by a generator keyed by (seed, epoch).
2. Each bucket's samples, in that order, are cut into micro-batches. The last one is filled by repeating from the start
   of the same bucket's order.
3. ``group`` micro-batches (data ranks × accumulation) make a step. They are of one cost in tokens wherever possible, so
   that ranks, which meet in every collective, wait little for each other: each cost class gives its whole steps, what
   is left of the classes is joined in the order of cost. If micro-batches are missing in the end, the bucket that came
   last in the shuffled order goes on repeating.
4. Steps come in the order of their earliest sample in the shuffled order. With one bucket this is the shuffled order
   itself, cut into steps, whatever the micro-batch size.

A sample's key is ``epoch · samples_per_epoch + position``, position counting through the steps; a repeated sample has
a key of its own, so its noise differs. Dealing a step to ranks happens after keys are given and changes none of this:
the same global batch on 1, 2 or 4 ranks is the same set of (sample, key).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SampleTable:
    """What the order needs to know of a data set, read once.

    Args:
        bucket: (N,) int64, the number of each sample's bucket, counted in order of first appearance.
        tokens: (N,) int64, each sample's cost.
    """

    bucket: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @classmethod
    def build(cls, buckets: Sequence[Hashable], tokens: Sequence[int]) -> SampleTable:
        """Number the buckets."""
        numbers: dict[Hashable, int] = {}
        bucket = np.fromiter((numbers.setdefault(b, len(numbers)) for b in buckets), np.int64, len(buckets))
        return cls(bucket, np.asarray(tokens, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.bucket)

    def take(self, samples: NDArray[np.int64]) -> SampleTable:
        """The table of some of the samples."""
        return SampleTable(np.unique(self.bucket[samples], return_inverse=True)[1], self.tokens[samples])

    @cached_property
    def digest(self) -> int:
        """A number that differs between tables that differ, equal on all ranks and machines; fits an int64."""
        columns = np.stack([self.bucket, self.tokens]).astype("<i8")
        return int.from_bytes(hashlib.blake2b(columns.tobytes(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class EpochOrder:
    """One epoch, laid out in steps.

    Args:
        index: (steps, group, micro_batch_size) int64: sample numbers.
        key: as ``index``: the samples' keys.
        cost: (steps, group) int64: tokens of each micro-batch.
        repeats: how many entries are repeats that fill up a micro-batch or the last step.
    """

    index: NDArray[np.int64]
    key: NDArray[np.int64]
    cost: NDArray[np.int64]
    repeats: int

    def deal(self, step: int, *, data_rank: int, data_size: int) -> NDArray[np.int64]:
        """Which micro-batches of a step belong to a rank: (group / data_size,), in the order it runs them.

        The step's micro-batches are sorted by cost and dealt row by row, so that what the ranks run at the same time
        costs about the same; rows go back and forth, so that no rank always gets the larger one.
        """
        # Stable, so that equal costs fall in the same order on every rank.
        rows = np.argsort(-self.cost[step], kind="stable").reshape(-1, data_size)
        rows[1::2] = rows[1::2, ::-1]
        return rows[:, data_rank]

    def imbalance(self, data_size: int) -> float:
        """Share of the epoch's time that ranks wait for one another, if time is proportional to tokens.

        Ranks meet in every micro-batch, so the largest one of each round counts: Σ largest / Σ mean − 1.
        """
        ordered = -np.sort(-self.cost, axis=1).reshape(-1, data_size)
        return float(ordered.max(1).sum() / ordered.mean(1).sum() - 1)


class DataOrder:
    """The global data order of a run; see [Note: global data order].

    Args:
        samples: buckets and costs.
        micro_batch_size: samples per micro-batch.
        group: micro-batches per step over all ranks (data ranks × accumulation).
        seed: the run's seed.
        shuffle: False keeps the order of the data set in every epoch.
    """

    def __init__(
        self, samples: SampleTable, *, micro_batch_size: int, group: int, seed: int, shuffle: bool = True
    ) -> None:
        self.samples = samples
        self.micro_batch_size, self.group = micro_batch_size, group
        self.seed, self.shuffle = seed, shuffle
        counts = np.bincount(samples.bucket)
        micro_batches = int(np.sum(-(-counts // micro_batch_size)))
        self.steps_per_epoch = -(-micro_batches // group)
        self.samples_per_step = group * micro_batch_size
        self.samples_per_epoch = self.steps_per_epoch * self.samples_per_step

    def epoch(self, epoch: int) -> EpochOrder:
        """Lay out one epoch; costs a few sorts of N numbers and keeps nothing."""
        shuffled = self._shuffled(epoch)
        batches, first = self._micro_batches(shuffled)
        cost = self.samples.tokens[batches].sum(1)
        steps = self._steps(cost, first)
        index = batches[steps]
        start = epoch * self.samples_per_epoch
        key = np.arange(start, start + index.size, dtype=np.int64).reshape(index.shape)
        return EpochOrder(index=index, key=key, cost=cost[steps], repeats=index.size - len(shuffled))

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(len(self.samples), dtype=np.int64)
        # Counter-based and keyed: any epoch's order can be made without those before it.
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch]))).permutation(
            len(self.samples)
        )

    def _micro_batches(self, shuffled: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All micro-batches of the epoch, (M, micro_batch_size), and the place of the first sample of each, (M,)."""
        size, bucket = self.micro_batch_size, self.samples.bucket[shuffled]
        by_bucket = np.argsort(bucket, kind="stable")  # places in the shuffled order, bucket by bucket
        members = np.split(by_bucket, np.cumsum(np.bincount(bucket))[:-1])
        wanted = [-(-len(places) // size) for places in members]
        # All ranks need whole steps, so the epoch is filled up here rather than cut.
        wanted[int(bucket[-1])] += self.steps_per_epoch * self.group - sum(wanted)
        batches, first = [], []
        for places, count in zip(members, wanted, strict=True):
            slots = np.arange(count * size)
            batches.append(shuffled[places[slots % len(places)]].reshape(count, size))
            lap = slots // len(places) * len(shuffled)  # a repeat comes after everything that isn't one
            first.append((places[slots % len(places)] + lap)[::size])
        return np.concatenate(batches), np.concatenate(first)

    def _steps(self, cost: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Group micro-batches into steps: (steps, group), numbers of micro-batches."""
        order = np.lexsort((first, cost))
        classes = np.split(order, np.flatnonzero(np.diff(cost[order])) + 1)
        whole = [members[: len(members) // self.group * self.group] for members in classes]
        left = [members[len(members) // self.group * self.group :] for members in classes]
        steps = np.concatenate([*whole, *left]).reshape(-1, self.group)
        steps = np.take_along_axis(steps, np.argsort(first[steps], axis=1, kind="stable"), axis=1)
        return steps[np.argsort(first[steps[:, 0]], kind="stable")]
