"""Saving and loading on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch

from mm_checkpoint import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled.*:UserWarning")


def save_run(rank: int, world_size: int, folder: str, replicate: int, asynchronous: bool) -> dict[str, Any]:
    model = toys.shard(toys.make_toy(), toys.make_mesh(world_size, replicate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    toys.train(model, optimizer)
    state = toys.state_of(model, optimizer, step=2, **{f"seen_{rank}": rank * 10})
    expected = {k: toys.full(v).clone() for s in ("model", "optimizer") for k, v in state[s].items()}
    with CheckpointManager(folder, async_save=asynchronous) as manager:
        manager.save(2, state)
        if asynchronous:  # what happens to the live tensors after the call must not reach the disk
            toys.train(model, optimizer)
    return expected


def load_run(rank: int, world_size: int, folder: str, replicate: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = toys.shard(toys.make_toy(seed=1), toys.make_mesh(world_size, replicate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    toys.train(model, optimizer, steps=1)
    state = toys.state_of(model, optimizer) | {"train": None}
    manager = CheckpointManager(folder)
    values = manager.load(manager.resolve("auto"), state)
    return {k: toys.full(v) for s in ("model", "optimizer") for k, v in state[s].items()}, values["train"]


LAYOUTS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]


@pytest.mark.parametrize(("world_size", "replicate"), LAYOUTS)
def test_resumes_on_any_mesh(run_ranks: Any, tmp_path: Path, world_size: int, replicate: int) -> None:
    """Save on 1, 2, 4 ranks, with and without replicas; load on all of these: equal bits, weights and optimizer."""
    asynchronous = world_size == 2
    expected = run_ranks(save_run, world_size, str(tmp_path), replicate, asynchronous)[0]
    size = sum(file.stat().st_size for file in (tmp_path / "iter_0000002").glob("*.distcp"))
    assert size < 1.0e5 + sum(tensor.nbytes for tensor in expected.values())  # replicas are written once
    for loaders, groups in LAYOUTS:
        for found, train in run_ranks(load_run, loaders, str(tmp_path), groups):
            toys.assert_same(found, expected)
            assert train == {"step": 2, **{f"seen_{rank}": rank * 10 for rank in range(world_size)}}
