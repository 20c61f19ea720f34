"""Saving and loading on several ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch
from torch import nn

from mm_checkpoint import CheckpointManager, load_weights
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint.errors import BadInputError, DestinationError, IncompleteCheckpointError, SaveError

# ranks -> numbers of replica groups
LAYOUTS = {1: (1,), 2: (1, 2), 4: (1, 2)}


def save_runs(rank: int, world_size: int, root: str) -> dict[int, dict[str, Any]]:
    """One run per mesh of this number of ranks; what it saved, in full. On 2 ranks it has really been trained."""
    expected = {}
    for replicate in LAYOUTS[world_size]:
        model = toys.shard(toys.make_toy(), toys.make_mesh(world_size, replicate))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if world_size == 2:
            toys.train(model, optimizer)
        else:
            toys.fill_optimizer(optimizer, torch.clone)  # the same on replicas
        state = toys.state_of(model, optimizer, step=2, **{f"seen_{rank}": rank * 10})
        expected[replicate] = {k: toys.full(v).clone() for s in ("model", "optimizer") for k, v in state[s].items()}
        with CheckpointManager(f"{root}/{world_size}_{replicate}", async_save=replicate == 2) as manager:
            manager.save(2, state)
            for parameter in model.parameters():  # what happens from now on must not reach the disk
                toys.local(parameter).fill_(-1.0)
    return expected


def load_runs(rank: int, world_size: int, root: str, runs: list[str]) -> dict[tuple[str, int], Any]:
    """Every run on every mesh of this number of ranks, into a model that started differently."""
    found = {}
    for replicate in LAYOUTS[world_size]:
        model = toys.shard(toys.make_toy(seed=1), toys.make_mesh(world_size, replicate))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for run in runs:
            toys.fill_optimizer(optimizer, torch.zeros_like)
            state = toys.state_of(model, optimizer) | {"train": None}
            manager = CheckpointManager(f"{root}/{run}")
            values = manager.load(manager.resolve("auto"), state)
            tensors = {k: toys.full(v).clone() for s in ("model", "optimizer") for k, v in state[s].items()}
            found[run, replicate] = (tensors, values["train"])
    return found


def test_resumes_on_any_mesh(run_ranks: Any, tmp_path: Path) -> None:
    """B011. Save on 1, 2, 4 ranks, with and without replicas; load on all of these: equal bits, optimizer included."""
    expected = {}
    for world_size in LAYOUTS:
        for replicate, tensors in run_ranks(save_runs, world_size, str(tmp_path))[0].items():
            expected[f"{world_size}_{replicate}"] = tensors
    for run in expected:
        DcpSource(tmp_path / run / "iter_0000002").check_items()
    for world_size in LAYOUTS:
        for per_rank in run_ranks(load_runs, world_size, str(tmp_path), list(expected)):
            for (run, _), (tensors, train) in per_rank.items():
                toys.assert_same(tensors, expected[run])
                assert train == {"step": 2, **{f"seen_{rank}": rank * 10 for rank in range(int(run[0]))}}


def load_shards(rank: int, world_size: int, source: str, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    model = toys.shard(toys.make_toy(seed=3, tied=options.pop("tied", False)), toys.make_mesh(world_size))
    report = load_weights(model, source, key_map=toys.KEY_MAP, **options)
    return {name: toys.full(tensor) for name, tensor in model.state_dict().items()}, report


@pytest.mark.parametrize("broadcast", [False, True])
def test_each_rank_reads_its_own_shard(run_ranks: Any, tmp_path: Path, broadcast: bool) -> None:
    """Sharded streaming load, uneven and 0-dim tensors included; with rank 0 reading for all as an option."""
    model = toys.make_toy()
    source = toys.write_source(tmp_path / "src", toys.as_source(model), shards=3)
    results = run_ranks(load_shards, 4, str(source), {"broadcast_from_rank0": broadcast})
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    for tensors, _ in results:
        toys.assert_same(tensors, dict(model.state_dict()))
    read = [report.bytes_read for _, report in results]
    assert sum(read) == total + (0 if broadcast else 3 * 4)  # the 0-dim buffer is everybody's
    assert read[1:] == [0, 0, 0] if broadcast else max(read) <= 0.45 * total


def test_casts_and_ties_on_shards(run_ranks: Any, tmp_path: Path) -> None:
    """A bf16 file into fp32 shards, with one name of a tied pair in the file."""
    model = toys.make_toy(tied=True)
    tensors = {n: t.bfloat16() if t.ndim else t for n, t in toys.as_source(model).items() if n != "out.weight"}
    source = toys.write_source(tmp_path / "src", tensors)
    for loaded, report in run_ranks(load_shards, 2, str(source), {"tied": True}):
        assert report.casts == {"bfloat16 -> float32": 8}
        assert report.ties == {"head.weight": "token.weight"}
        expected = {name: t.bfloat16().float() if t.ndim else t for name, t in model.state_dict().items()}
        toys.assert_same(loaded, expected)


def broken_broadcast(rank: int, world_size: int, source: str) -> str:
    with pytest.raises(BadInputError) as caught:
        load_weights(toys.make_toy(), source, key_map=toys.KEY_MAP, broadcast_from_rank0=True)
    return str(caught.value)


def test_broadcast_fails_on_every_rank(run_ranks: Any, tmp_path: Path) -> None:
    """A source that doesn't fit: no rank is left waiting for rank 0."""
    tensors = toys.as_source(toys.make_toy())
    del tensors["embed.weight"]
    messages = run_ranks(broken_broadcast, 2, str(toys.write_source(tmp_path / "src", tensors)))
    assert all("token.weight" in message for message in messages)


class Thin(nn.Module):
    """Parameters with fewer rows than ranks: some ranks hold nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.arange(12.0).reshape(1, 6, 2))
        self.alias = self.modulation
        self.rows = nn.Parameter(torch.arange(6.0).reshape(3, 2))


def thin_round_trip(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = toys.make_mesh(world_size)
    with CheckpointManager(folder) as manager:
        path = manager.save(1, {"model": fully_shard(Thin(), mesh=mesh).state_dict()})
        other = fully_shard(Thin(), mesh=mesh)
        for parameter in other.parameters():
            toys.local(parameter).fill_(-1.0)
        manager.load(path, {"model": other.state_dict()})
        again = fully_shard(Thin(), mesh=mesh)
        load_weights(again, path)
    assert all(torch.equal(toys.local(a), toys.local(b)) for a, b in zip(again.parameters(), other.parameters()))
    return {name: toys.full(tensor) for name, tensor in other.state_dict().items()}


def test_ranks_that_hold_nothing(run_ranks: Any, tmp_path: Path) -> None:
    """One row on four ranks, tied on top: written once, read by whoever has a part."""
    for found in run_ranks(thin_round_trip, 4, str(tmp_path)):
        toys.assert_same(found, dict(Thin().state_dict()))
    source = DcpSource(tmp_path / "iter_0000001")
    assert source.tensors["model.alias"].storage == source.tensors["model.modulation"].storage


def load_without_metadata(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    model = toys.shard(toys.make_toy(), toys.make_mesh(world_size))
    manager = CheckpointManager(folder)
    for step in (2, 4):
        manager.save(step, toys.state_of(model))
    if rank == 0:
        (Path(folder) / "iter_0000004" / ".metadata").unlink()
    torch.distributed.barrier()
    start = time.monotonic()
    with pytest.raises(IncompleteCheckpointError) as caught:
        manager.load(Path(folder) / "iter_0000004", toys.state_of(model))
    with pytest.raises(IncompleteCheckpointError):
        manager.resolve(folder)
    assert manager.resolve("auto") == Path(folder) / "iter_0000002"
    return str(caught.value), time.monotonic() - start


def test_missing_metadata_fails_fast_everywhere(run_ranks: Any, tmp_path: Path) -> None:
    """B009. The newest iteration lacks .metadata and the tracker names it: one short error on each rank, no hang."""
    results = run_ranks(load_without_metadata, 2, str(tmp_path))
    assert len({message for message, _ in results}) == 1
    message, seconds = results[0]
    assert ".metadata: missing" in message
    assert "the newest older complete one is" in message
    assert "iter_0000002" in message
    assert seconds < 30


def save_to_own_disk(rank: int, world_size: int, root: str) -> tuple[str, str]:
    from mm_checkpoint._disk import files

    files.SHARED_WITHIN_S = 0.3
    model = toys.shard(toys.make_toy(), toys.make_mesh(world_size))
    folder = Path(root) / f"node{rank // 2}"
    folder.mkdir(exist_ok=True)
    messages = []
    for attempt in (lambda m: m.prepare(0), lambda m: m.save(1, toys.state_of(model))):
        with pytest.raises(DestinationError) as caught:
            attempt(CheckpointManager(folder))
        messages.append(str(caught.value))
    assert not any(folder.glob("iter_*"))
    return messages[0], messages[1]


def test_node_local_folders_are_detected(run_ranks: Any, tmp_path: Path) -> None:
    """B010. Ranks 0-1 and 2-3 have different disks under one path: said at the start and at the first save."""
    for messages in run_ranks(save_to_own_disk, 4, str(tmp_path)):
        for message in messages:
            assert "rank 2: " in message
            assert "all ranks share" in message


def fail_on_one_rank(rank: int, world_size: int, folder: str) -> tuple[str, bool]:
    import errno

    from mm_checkpoint._disk import durable

    model = toys.shard(toys.make_toy(), toys.make_mesh(world_size))
    state = toys.state_of(model, step=1)
    manager = CheckpointManager(folder)
    manager.save(1, state)

    def full_disk(self: Any, piece: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    original = durable.DurableFile._put
    if rank == 1:
        durable.DurableFile._put = full_disk  # type: ignore[method-assign]
    with pytest.raises(SaveError) as caught:
        manager.save(2, state)
    durable.DurableFile._put = original  # type: ignore[method-assign]
    manager.save(3, state)  # and the manager goes on
    return str(caught.value), manager.latest() == Path(folder) / "iter_0000003"


def test_a_failing_rank_fails_the_save_on_all(run_ranks: Any, tmp_path: Path) -> None:
    """One rank's disk is full: all raise, the earlier checkpoint stays, nothing is left over, saving can go on."""
    for message, went_on in run_ranks(fail_on_one_rank, 2, str(tmp_path)):
        assert message.startswith("rank 1: ")
        assert "No space left" in message
        assert went_on
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def save_different_values(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ValueError, match="differ between ranks") as caught:
        CheckpointManager(folder).save(1, {"train": {"position": rank, "rng": torch.tensor([rank])}})
    return str(caught.value)


def test_values_that_differ_between_ranks_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    """B017 (the checkpoint's side). One rank's value must not silently stand for the others'."""
    for message in run_ranks(save_different_values, 2, str(tmp_path)):
        assert "train.position" in message
        assert "train.rng" in message


def save_tied(rank: int, world_size: int, folder: str) -> None:
    model = toys.shard(toys.make_toy(tied=True), toys.make_mesh(world_size))
    CheckpointManager(folder).save(1, toys.state_of(model))


def test_tied_shards_are_written_once(run_ranks: Any, tmp_path: Path) -> None:
    """B006 (sharded). Two names for one tensor: one copy on the disk, both names readable."""
    run_ranks(save_tied, 2, str(tmp_path))
    source = DcpSource(tmp_path / "iter_0000001")
    names = ("model.net.head.weight", "model.net.token.weight")
    extents = [[extent for _, extent in source.metadata.tensors[name].chunks] for name in names]
    assert extents[0] == extents[1]


def open_device_only_group(rank: int, world_size: int, folder: str) -> bool:
    """As on a machine whose group has a device backend alone: no object can be gathered through it."""
    import torch.distributed as dist

    from mm_checkpoint import _ranks

    group = _ranks.Ranks.current(own_group=True).group
    assert group is not dist.group.WORLD
    with CheckpointManager(folder, async_save=True) as manager:
        manager.prepare(0)
        manager.save(1, {"train": {"step": 1}})
        manager.wait()
        return manager.latest() is not None


def test_async_save_brings_its_own_group(run_ranks: Any, tmp_path: Path) -> None:
    """B025. Background saves use a gloo group that the manager makes, tried out by `prepare` in the first seconds."""
    assert run_ranks(open_device_only_group, 2, str(tmp_path)) == [True, True]


def resume_with_a_lag(rank: int, world_size: int, folder: str) -> str:
    """Rank 1's view of the shared disk shows the new folder two seconds late."""
    from unittest.mock import patch

    CheckpointManager(folder).save(1, {"train": {"step": 1}})
    hidden_until = time.monotonic() + (2.0 if rank == 1 else 0.0)
    stat = Path.stat

    def late_stat(self: Path, **options: Any) -> Any:
        if time.monotonic() < hidden_until and str(self).startswith(folder):
            raise FileNotFoundError(2, "not seen yet", str(self))
        return stat(self, **options)

    with patch.object(Path, "stat", late_stat):
        manager = CheckpointManager(folder)
        found = manager.resolve("auto")
        assert found is not None
        assert manager.load(found, {"train": None})["train"] == {"step": 1}
    return found.name


def test_rank_0_decides_which_checkpoint_is_resumed(run_ranks: Any, tmp_path: Path) -> None:
    """B103. Were each rank to look by itself, the late one would start afresh, and the collectives get out of step."""
    assert run_ranks(resume_with_a_lag, 2, str(tmp_path), timeout=60) == ["iter_0000001"] * 2


def peak_of_load(rank: int, world_size: int, source: str) -> tuple[int, int]:
    from torch.distributed.fsdp import fully_shard

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    from threading import Event, Thread

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))
    for layer in model:
        fully_shard(layer, mesh=toys.make_mesh(world_size))
    base, peak, stop = anonymous(), 0, Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, anonymous())

    watcher = Thread(target=watch)
    watcher.start()
    model.to_empty(device="cpu")
    report = load_weights(model, source)
    stop.set()
    watcher.join()
    return peak - base, report.bytes_read


@pytest.mark.slow
def test_no_rank_holds_the_model(run_ranks: Any, tmp_path: Path) -> None:
    """B107. A 400 MB model on 4 ranks from meta: all ranks' host memory together stays near one model."""
    tensors = {f"{i}.weight": torch.randn(2048, 2048) for i in range(24)}
    source = toys.write_source(tmp_path / "src", tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    results = run_ranks(peak_of_load, 4, str(source))
    assert sum(peak for peak, _ in results) < 1.5 * total
    assert all(read == total // 4 for _, read in results)
