"""The main job on real clips, through the trainer: equal on any layout, exact on resume, frozen where told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbers_close import FP32_TRACE
from rank_training import PRELOAD, read_checkpoint, trace, train_rank
from workspace import Workspace


def settings(run: Path, *, steps: int, micro: int, accumulate: int = 1, **more: Any) -> list[str]:
    values = {
        "training.save": run,
        "training.train_iters": steps,
        "training.micro_batch_size": micro,
        "training.gradient_accumulation_steps": accumulate,
        "training.save_interval": 1000,
        "training.val_interval": 0,
        "training.save_async": "false",
        "data.dataloader_param.num_workers": 0,
        "data.dataset_param.buckets": "[[48, 64]]",
    }
    return [f"{key}={value}" for key, value in {**values, **more}.items()]


@pytest.fixture(scope="module")
def reference_trace(run_ranks, workspace: Workspace, tmp_path_factory) -> list[float]:
    """20 steps on one rank, the global batch of 4 in one micro-batch."""
    run = tmp_path_factory.mktemp("reference") / "run"
    (records,) = run_ranks(train_rank, 1, workspace.environ, settings(run, steps=20, micro=4), preload=PRELOAD)
    return trace(records)


@pytest.mark.parametrize(("ranks", "micro", "accumulate"), [(1, 2, 2), (2, 2, 1), (2, 1, 2)])
def test_the_loss_trace_is_the_same_on_any_layout(
    run_ranks, workspace: Workspace, tmp_path: Path, reference_trace, ranks: int, micro: int, accumulate: int
) -> None:
    """B097: the same global batch over other ranks and accumulation steps gives the same run."""
    overrides = settings(tmp_path / "run", steps=20, micro=micro, accumulate=accumulate)
    records = run_ranks(train_rank, ranks, workspace.environ, overrides, preload=PRELOAD)[0]
    assert len(reference_trace) == 20
    assert len(set(reference_trace)) > 10, "a constant trace would prove nothing"
    np.testing.assert_allclose(trace(records), reference_trace, rtol=FP32_TRACE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # read_tensors means to
def test_ten_steps_and_a_resume_equal_twenty_bit_for_bit(run_ranks, workspace: Workspace, tmp_path: Path) -> None:
    """B013, B015, B016, B112: weights, optimizer, learning rate, data position and noise all go on where they were."""
    cosine = {"training.lr_decay_style": "cosine", "training.lr_warmup_iters": 3, "training.save_interval": 10}
    whole = settings(tmp_path / "whole", steps=20, micro=1, **cosine)
    whole_records = run_ranks(train_rank, 2, workspace.environ, whole, preload=PRELOAD)[0]
    load = {"training.load": tmp_path / "whole" / "iter_0000010"}
    rest = settings(tmp_path / "rest", steps=20, micro=1, **cosine, **load)
    rest_records = run_ranks(train_rank, 2, workspace.environ, rest, preload=PRELOAD)[0]

    for figure in ("loss", "grad_norm", "lr", "samples"):
        assert trace(rest_records, figure) == trace(whole_records, figure)[10:]
    one, two = (read_tensors(tmp_path / name / "iter_0000020") for name in ("whole", "rest"))
    assert one.keys() == two.keys()
    assert any(name.startswith("optimizer.") for name in one)
    for name, tensor in one.items():
        assert np.array_equal(tensor, two[name]), name
    before = read_tensors(tmp_path / "whole" / "iter_0000010")
    assert any(not np.array_equal(tensor, before[name]) for name, tensor in one.items()), "nothing was trained"


def read_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, as arrays to compare."""
    return {name: tensor.numpy() for name, tensor in read_checkpoint(checkpoint).items()}
