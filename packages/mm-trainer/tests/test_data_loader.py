"""Loading: bad samples, workers, memory, and who reads what."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data_clips import context, write_clip
from data_fakes import NumberDataset

from mm_trainer.data.bad_samples import BadSampleLog, LoadedBatch
from mm_trainer.data.batch import collate
from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.data.video.dataset import VideoDataset
from mm_trainer.errors import BadSample, DataError

TWO_WORKERS = WorkerOptions(num_workers=2)


def numbers(loader: BatchLoader, count: int) -> list[list[int]]:
    return [batch["number"].tolist() for batch in islice(loader, count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_replaced_alike_and_listed_once(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """B064: replaced from the same bucket, the same way every time; both ranks make the same number of steps."""
    data = NumberDataset([0] * 10 + [1] * 10, bad=[3, 14])
    options: dict[str, Any] = {"micro_batch_size": 2, "data_size": 2, "seed": 5, "max_bad_fraction": 0.1}
    workers_option = WorkerOptions(num_workers=workers)
    seen = []
    for rank in range(2):
        loader = BatchLoader(data, data_rank=rank, workers=workers_option, **options)
        batches = list(islice(loader, 3 * loader.steps_per_epoch))
        assert all(len(set(batch["bucket"].tolist())) == 1 for batch in batches)
        assert not {3, 14} & {number for batch in batches for number in batch["number"].tolist()}
        seen.append([batch["number"].tolist() for batch in batches])
        again = BatchLoader(data, data_rank=rank, **options)
        again.seek(4)
        assert numbers(again, len(batches) - 4) == seen[rank][4:]
        assert loader.bad.count <= 2
        assert loader.bad.replaced >= loader.bad.count
    assert caplog.text.count("bad sample: sample 3: broken") <= 4  # four loaders, each says it at most once


def test_too_many_bad_samples_stop_the_run() -> None:
    loader = BatchLoader(NumberDataset([0] * 20, bad=range(4)), micro_batch_size=1, max_bad_fraction=0.1)
    with pytest.raises(DataError, match=r"3 bad samples so far, 15\.0%, more than max_bad_fraction 0\.1: sample"):
        list(islice(loader, 200))


def test_the_share_is_of_what_a_rank_comes_by() -> None:
    """One of eight data ranks sees an eighth of the bad samples in an epoch, and stops at the same share."""
    size, tolerated, too_many = 800, range(0, 800, 20), range(0, 800, 8)

    def read_epochs(bad: range, epochs: int) -> None:
        loader = BatchLoader(NumberDataset([0] * size, bad=bad), micro_batch_size=1, data_size=8, max_bad_fraction=0.1)
        list(islice(loader, epochs * loader.steps_per_epoch))

    read_epochs(tolerated, 4)
    with pytest.raises(DataError, match="more than max_bad_fraction"):
        read_epochs(too_many, 1)


def test_one_bad_sample_of_a_small_part_is_no_share() -> None:
    """1 of 24 on two ranks, and 10 of 1,000 on 64, are below 5 % wherever they turn up."""
    for size, ranks, bad in ((24, 2, [5]), (1000, 64, range(0, 1000, 100))):
        for rank in range(ranks):
            loader = BatchLoader(
                NumberDataset([0] * size, bad=bad),
                micro_batch_size=1,
                data_rank=rank,
                data_size=ranks,
                max_bad_fraction=0.05,
            )
            list(islice(loader, loader.steps_per_epoch))


def test_on_bad_sample_error_stops_at_the_first() -> None:
    loader = BatchLoader(
        NumberDataset([0] * 8, bad=[2]), micro_batch_size=1, on_bad_sample="error", max_bad_fraction=1.0
    )
    with pytest.raises(DataError, match="on_bad_sample: error: sample 2: broken"):
        list(islice(loader, 8))
    with pytest.raises(DataError, match="sample 2: broken"):
        list(fixed_batches(NumberDataset([0] * 8, bad=[2]), quantiles=[0.5], micro_batch_size=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_usable_ends_with_the_reason(workers: int) -> None:
    """B062, B064: never an endless loop."""
    data = NumberDataset([0] * 200, bad=range(200))
    loader = BatchLoader(data, micro_batch_size=1, max_bad_fraction=1.0, workers=WorkerOptions(num_workers=workers))
    with pytest.raises(DataError, match=r"no usable sample in its bucket, 3\d tried: sample \d+: broken"):
        next(iter(loader))


class Interrupted(NumberDataset):
    """Raises, or ends its process, at sample 5."""

    def __init__(self, how: str) -> None:
        super().__init__([0] * 8)
        self.how = how

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        if index == 5 and self.how == "raise":
            raise KeyError("a fault of the data set")
        if index == 5:
            os._exit(3)
        return super().load(index, sample_key)


@pytest.mark.parametrize(("how", "message"), [("raise", "a fault of the data set"), ("exit", "exited unexpectedly")])
def test_a_workers_fault_ends_the_job(run_ranks: Any, how: str, message: str) -> None:
    """B069: with its traceback, or as a dead worker; it isn't retried."""
    with pytest.raises(AssertionError, match=message):  # in a process of its own: torch raises from a signal handler
        run_ranks(read_interrupted, 1, how, init_process_group=False)


def read_interrupted(rank: int, world_size: int, how: str) -> None:
    loader = BatchLoader(Interrupted(how), micro_batch_size=1, workers=TWO_WORKERS)
    for _ in islice(loader, 8):
        time.sleep(0.1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_four_workers_for_300_batches_after_decoding_in_the_parent(tmp_path: Path) -> None:
    """B069: the parent has decoded with threads before the workers are forked; they finish all the same."""
    data = clips(tmp_path)
    data.load(0, 0)
    torch.ones(256, 256) @ torch.ones(256, 256)
    started = time.monotonic()
    loader = BatchLoader(data, micro_batch_size=1, workers=WorkerOptions(num_workers=4))
    assert len(list(islice(loader, 300))) == 300
    assert time.monotonic() - started < 60


def clips(folder: Path, rows: int = 3) -> VideoDataset:
    """Many rows on three clips, sizes stated."""
    for number in range(3):
        write_clip(folder / f"{number}.mp4", frames=6)
    lines = ["video,prompt,width,height,num_frames,fps", *(f"{n % 3}.mp4,clip {n},64,48,6,16" for n in range(rows))]
    (folder / "m.csv").write_text("\n".join(lines))
    return VideoDataset({"data_path": folder / "m.csv", "num_frames": 5, "buckets": [[48, 64]]}, context())


class Weighed:
    """Adds the resident memory of the process that reads, in MB."""

    def __init__(self, dataset: VideoDataset) -> None:
        self.dataset = dataset
        self.bucket, self.tokens = dataset.bucket, dataset.tokens

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return self.dataset.load(index, sample_key) | {"rss": pages * os.sysconf("SC_PAGE_SIZE") / 1e6}


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_stays_flat(tmp_path: Path, workers: int) -> None:
    """B068: 2,000 samples of a table with 200,000 rows."""
    loader = BatchLoader(
        Weighed(clips(tmp_path, rows=200_000)), micro_batch_size=4, workers=WorkerOptions(num_workers=workers)
    )
    rss = [batch["rss"].max().item() for batch in islice(loader, 500)]
    assert max(rss[-50:]) - max(rss[:50]) < 50


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    next(iter(BatchLoader(NumberDataset([0] * 8), micro_batch_size=2, workers=TWO_WORKERS)))
    assert torch.equal(torch.rand(3), expected)


def test_position_counts_whole_steps_and_what_the_caller_used() -> None:
    loader = BatchLoader(NumberDataset([0] * 64), micro_batch_size=1, accumulation=4)
    list(islice(loader, 6))
    assert loader.state_dict()["step"] == 1
    assert loader.state_dict(step=0)["step"] == 0


def test_ranks_of_a_context_group_read_the_same(run_ranks: Any, tmp_path: Path) -> None:
    """B052, B053: 4 ranks as 2 data ranks × 2 (ulysses, then ring); 8 numbered clips."""
    for name in ("ulysses_parallel_size", "ring_attention_size"):
        results = run_ranks(read_an_epoch, 4, name)
        by_data_rank: dict[int, list[Any]] = {}
        for data_rank, batches in results:
            by_data_rank.setdefault(data_rank, []).append(batches)
        assert [len(group) for group in by_data_rank.values()] == [2, 2]
        assert all(group[0] == group[1] for group in by_data_rank.values())
        ids = [number for group in by_data_rank.values() for numbers, _ in group[0] for number in numbers]
        assert sorted(ids) == list(range(8))


def read_an_epoch(rank: int, world_size: int, axis: str) -> tuple[int, list[Any]]:
    from mm_parallel import ParallelMesh
    from mm_parallel.config import ParallelConfig
    from mm_parallel.sizes import MeshSizes

    mesh = ParallelMesh.build(MeshSizes.resolve(ParallelConfig(**{axis: 2}), world_size), device_type="cpu")
    loader = BatchLoader(
        NumberDataset([0] * 8), micro_batch_size=2, data_rank=mesh.data_rank, data_size=mesh.data_size, seed=9
    )
    batches = islice(loader, loader.steps_per_epoch)
    return mesh.data_rank, [(batch["number"].tolist(), batch["sample_key"].tolist()) for batch in batches]


def test_collate_nests_and_names_what_differs() -> None:
    batch = collate([{"conditions": {"latents": torch.ones(2), "n": 1}, "text": "a"}] * 2)
    assert batch["conditions"]["latents"].shape == (2, 2)
    assert batch["conditions"]["n"].tolist() == [1, 1]
    assert batch["text"] == ["a", "a"]
    with pytest.raises(ValueError, match=r"shape of conditions\.latents: \[\(2,\), \(3,\)\]"):
        collate([{"conditions": {"latents": torch.ones(n)}} for n in (2, 3)])
    with pytest.raises(ValueError, match="differ in their entries"):
        collate([{"a": 1}, {"b": 1}])


def test_bad_sample_crosses_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(BadSample("a.mp4", "broken")))
    assert (error.where, error.reason) == ("a.mp4", "broken")


def test_ranks_that_see_different_data_do_not_start(run_ranks: Any) -> None:
    """A file that one machine can't read would give its ranks another number of steps; all of them say so instead."""
    messages = run_ranks(compare_tables, 2)
    assert all("of 3 to 4 usable samples" in message for message in messages)


def compare_tables(rank: int, world_size: int) -> str:
    from mm_trainer.data.open import check_agreement
    from mm_trainer.data.order import SampleTable

    check_agreement(SampleTable.build([0] * 4, [1] * 4), torch.device("cpu"))
    try:
        check_agreement(SampleTable.build([0] * (4 - rank), [1] * (4 - rank)), torch.device("cpu"))
    except DataError as error:
        return str(error)
    return ""


def test_bad_samples_are_counted_by_where_they_are_not_by_what_was_said() -> None:
    """One file that fails in two ways is one bad sample; a mix may meet it under two numbers, too."""
    log = BadSampleLog(size=100, data_size=1, known=0, on_bad_sample="replace", max_fraction=0.5)
    batch = {"sample_key": torch.zeros(1)}
    log.check(LoadedBatch(batch, (((3, "a.mp4", "ends at frame 7"), (4, "b.mp4", "no such file")),)))
    log.check(LoadedBatch(batch, (((53, "a.mp4", "ends at frame 8"),),)))
    assert log.count == 2
