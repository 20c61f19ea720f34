"""The global data order: the same samples and keys whatever the layout of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from data_fakes import NumberDataset

from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.data.order import DataOrder, SampleTable
from mm_trainer.errors import DataError

THREE_BUCKETS = [0] * 23 + [1] * 10 + [2] * 7


def steps(
    dataset: NumberDataset, count: int, *, data_size: int, accumulation: int, start: int = 0, **options: Any
) -> list[Any]:
    """Per step: all ranks' micro-batches as (numbers, keys) tuples."""
    per_rank = []
    for rank in range(data_size):
        loader = BatchLoader(dataset, data_rank=rank, data_size=data_size, accumulation=accumulation, seed=3, **options)
        loader.seek(start)
        batches = islice(loader, count * accumulation)
        per_rank.append([(tuple(b["number"].tolist()), tuple(b["sample_key"].tolist())) for b in batches])
    return [
        [batch for batches in per_rank for batch in batches[step * accumulation : (step + 1) * accumulation]]
        for step in range(count)
    ]


@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_steps_are_the_same_for_any_dealing(layout: tuple[int, int]) -> None:
    data = NumberDataset(THREE_BUCKETS)
    one = steps(data, 20, data_size=1, accumulation=4, micro_batch_size=2)
    other = steps(data, 20, data_size=layout[0], accumulation=layout[1], micro_batch_size=2)
    assert [sorted(step) for step in one] == [sorted(step) for step in other]


def test_one_bucket_gives_the_same_steps_for_any_micro_batch_size() -> None:
    data = NumberDataset([0] * 21)

    def flat(size: int) -> list[list[tuple[int, int]]]:
        found = steps(data, 12, data_size=1, accumulation=8 // size, micro_batch_size=size)
        return [sorted((n, k) for numbers, keys in step for n, k in zip(numbers, keys)) for step in found]

    assert flat(1) == flat(2) == flat(4) == flat(8)


def test_every_sample_once_where_sizes_divide_and_repeats_counted_where_not() -> None:
    """B053, B076"""
    order = DataOrder(SampleTable.build([0] * 8 + [1] * 8, [1] * 16), micro_batch_size=2, group=4, seed=0)
    assert order.steps_per_epoch == 2
    assert sorted(order.epoch(0).index.ravel()) == list(range(16))
    assert order.epoch(0).repeats == 0
    uneven = DataOrder(SampleTable.build(THREE_BUCKETS, [1] * 40), micro_batch_size=2, group=4, seed=0)
    epoch = uneven.epoch(0)
    counts = Counter(epoch.index.ravel().tolist())
    assert set(counts) == set(range(40))
    assert sum(counts.values()) - 40 == epoch.repeats == uneven.samples_per_epoch - 40
    assert len(np.unique(epoch.key)) == epoch.key.size


def test_micro_batches_hold_one_bucket_and_keys_count_through_epochs() -> None:
    data = NumberDataset(THREE_BUCKETS)
    loader = BatchLoader(data, micro_batch_size=2, accumulation=4, seed=1)
    batches = list(islice(loader, 3 * loader.steps_per_epoch * 4))
    assert all(len(set(batch["bucket"].tolist())) == 1 for batch in batches)
    keys = [key for batch in batches for key in batch["sample_key"].tolist()]
    assert sorted(keys) == list(range(len(keys)))


def test_set_smaller_than_a_step_repeats() -> None:
    """B076: one clip, micro batch 2, four accumulation steps on two ranks."""
    order = DataOrder(SampleTable.build([0], [1]), micro_batch_size=2, group=8, seed=0)
    epoch = order.epoch(0)
    assert epoch.index.shape == (1, 8, 2)
    assert epoch.repeats == 15


def test_epochs_differ_and_are_reproducible() -> None:
    order = DataOrder(SampleTable.build([0] * 64, [1] * 64), micro_batch_size=1, group=1, seed=5)
    assert not np.array_equal(order.epoch(0).index, order.epoch(1).index)
    assert np.array_equal(order.epoch(7).index, order.epoch(7).index)
    plain = DataOrder(SampleTable.build([0] * 5, [1] * 5), micro_batch_size=1, group=1, seed=5, shuffle=False)
    assert plain.epoch(3).index.ravel().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_mid_epoch_gives_the_same_batches_on_other_ranks(workers: int) -> None:
    """B016, B017"""
    data = NumberDataset(THREE_BUCKETS)
    options = {"micro_batch_size": 2, "workers": WorkerOptions(num_workers=workers)}
    whole = steps(data, 14, data_size=2, accumulation=2, **options)
    loader = BatchLoader(data, data_size=2, accumulation=2, seed=3, **options)
    list(islice(loader, 6 * 2))
    state = loader.state_dict()
    assert state["step"] == 6
    other = BatchLoader(data, data_size=4, accumulation=1, seed=3, **options)
    other.load_state_dict(state)
    rest = steps(data, 8, data_size=4, accumulation=1, start=other.step, **options)
    assert [sorted(step) for step in whole[6:]] == [sorted(step) for step in rest]


def test_going_to_a_position_reads_nothing() -> None:
    """B016"""
    data = NumberDataset(THREE_BUCKETS)
    loader = BatchLoader(data, micro_batch_size=2, seed=3)
    loader.seek(1_000_000)
    next(iter(loader))
    assert data.loads == 2


def test_state_of_another_run_is_refused() -> None:
    """B017"""
    loader = BatchLoader(NumberDataset([0] * 8), micro_batch_size=2, seed=3)
    with pytest.raises(DataError, match="lacks the data position: no num_samples"):
        loader.load_state_dict({"step": 3})
    with pytest.raises(DataError, match=r"the data set has changed \(9 samples then, 8 now\)"):
        loader.load_state_dict(loader.state_dict() | {"num_samples": 9})


def test_another_micro_batch_size_goes_on_with_one_bucket_only() -> None:
    """With several, it decides what a step holds: samples of the epoch would be lost, others come twice."""
    for buckets, fits in (([0] * 8, True), ([0, 1] * 8, False)):
        saved = BatchLoader(NumberDataset(buckets), micro_batch_size=2, seed=3).state_dict()
        other = BatchLoader(NumberDataset(buckets), micro_batch_size=1, accumulation=2, seed=3)
        if fits:
            other.load_state_dict(saved)
        else:
            with pytest.raises(
                DataError, match="micro_batch_size was 2, is 1, which orders several buckets differently"
            ):
                other.load_state_dict(saved)


def test_samples_that_moved_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class Named(NumberDataset):
        def __init__(self, names: str) -> None:
            super().__init__([0] * len(names))
            self.names = names

        def name(self, index: int) -> str:
            return self.names[index]

    saved = BatchLoader(Named("abcd"), micro_batch_size=2).state_dict()
    for data in (Named("abcd"), NumberDataset([0] * 4)):
        BatchLoader(data, micro_batch_size=2).load_state_dict(saved)
    assert "moved" not in caplog.text
    BatchLoader(Named("abdc"), micro_batch_size=2).load_state_dict(saved)
    assert "samples were renamed, replaced or moved since the checkpoint" in caplog.text


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (8, 1), (8, 4)])
def test_ranks_wait_little_for_one_another(ranks: int, accumulation: int) -> None:
    """Three aspects × three lengths: at most 10 %, where dealing in shuffled order costs several times that."""
    generator = np.random.default_rng(0)
    tokens = (np.array([5, 13, 21])[:, None] * np.array([1560, 1560, 1521])).ravel()
    chosen = generator.choice(9, size=3000)
    table = SampleTable.build(chosen.tolist(), tokens[chosen].tolist())
    order = DataOrder(table, micro_batch_size=2, group=ranks * accumulation, seed=0)
    rounds = tokens[chosen][: 3000 // (2 * ranks) * 2 * ranks].reshape(-1, ranks, 2).sum(2)
    assert order.epoch(0).imbalance(ranks) < 0.1 < rounds.max(1).sum() / rounds.mean(1).sum() - 1


def test_repeats_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """B076"""
    with caplog.at_level("INFO"):
        BatchLoader(NumberDataset([0] * 3), micro_batch_size=2, data_size=2)
    assert "1 of 4 samples of an epoch are repeats" in caplog.text


def test_fixed_batches_cover_every_sample_and_quantile_once() -> None:
    data = NumberDataset([0, 0, 0, 1, 1])
    seen, counts = [], []
    for rank in range(2):
        batches = list(fixed_batches(data, quantiles=[0.1, 0.9], micro_batch_size=4, data_rank=rank, data_size=2))
        counts.append(len(batches))
        for batch in batches:
            rows = zip(batch["number"].tolist(), batch["quantile"].tolist(), batch["sample_weight"].tolist())
            seen += [(number, level) for number, level, kept in rows if kept]
    assert counts[0] == counts[1]
    assert sorted(seen) == [(number, level) for number in range(5) for level in (0.1, 0.9)]
