"""Stopping, saving and starting from the outside: signals, files, warm starts, and what a resume says."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_training import read_checkpoint, trace, train_rank
from test_trainer_single_model import CONFIG, inspect_start

from mm_trainer.engine.config_diff import compare_configs


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


def train_and_interrupt(rank: int, world_size: int, config_file: str, action: str) -> list[int]:
    """Train; after the batch of step 3 rank 1 gets a SIGTERM, or somebody makes a file. Returns the saved steps."""
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    config = resolve(load_config(config_file, ["training.gc_interval=1"]), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    folder, batches = Path(config.training.save), engine.batches

    def interrupted() -> Any:
        for number, batch in enumerate(batches, 1):
            if number == 3 * engine.config.gradient_accumulation_steps:
                if action == "sigterm" and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if action != "sigterm" and rank == 0:
                    (folder / action).touch()
            yield batch

    engine.batches = interrupted()
    with engine.services.metrics:
        engine.train()
    assert not (folder / action).exists()
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize(("action", "saved"), [("sigterm", [3]), ("stop", [3]), ("save_now", [3, 8])])
def test_a_request_reaches_all_ranks_at_the_same_step(run_ranks, config: str, action: str, saved: list[int]) -> None:
    """A signal to one rank is enough; the step is finished and saved, and the process ends without an error."""
    for found in run_ranks(train_and_interrupt, 2, config, action):
        assert found == saved


def test_a_warm_start_takes_the_weights_and_nothing_else(run_ranks, config: str, tmp_path: Path) -> None:
    run_ranks(train_rank, 2, {}, [], config)
    run = Path(config).parent / "run"
    warm = [f"training.init_from={run}", f"training.save={tmp_path / 'warm'}"]
    start = run_ranks(inspect_start, 2, config, warm)[1]
    trained = read_checkpoint(run / "iter_0000008")
    for name, array in start.items():
        assert (array == trained[f"model.{name}"].numpy()).all()
    records = run_ranks(train_rank, 2, {}, warm, config)[0]
    assert [record["step"] for record in records] == list(range(1, 9))
    assert records[0]["samples"] == 4

    records = run_ranks(train_rank, 2, {}, [*warm, "training.load=auto", "training.train_iters=9"], config)[0]
    assert [record["step"] for record in records] == list(range(1, 10)), "started again, it goes on from its own"

    still = ["training.lr=0", "training.ema.enable=true", f"training.save={tmp_path / 'still'}"]
    run_ranks(train_rank, 2, {}, [f"training.init_from={run}", *still], config)
    state = read_checkpoint(tmp_path / "still" / "iter_0000008")
    for name, tensor in trained.items():
        if name.startswith("model."):
            assert torch.equal(state[name.replace("model.", "ema.", 1)], tensor), "the average begins at these weights"


@pytest.mark.numeric
def test_an_average_may_begin_at_a_resume(run_ranks, config: str) -> None:
    run_ranks(train_rank, 2, {}, ["training.train_iters=4"], config)
    run = Path(config).parent / "run"
    resumed = ["training.load=auto", "training.ema.enable=true", "training.ema.decay=0.5"]
    run_ranks(train_rank, 2, {}, [*resumed, "training.train_iters=5"], config)
    before, after = (read_checkpoint(run / f"iter_000000{step}") for step in (4, 5))
    for name in (n for n in before if n.startswith("model.")):
        expected = 0.5 * before[name] + 0.5 * after[name]
        torch.testing.assert_close(after[name.replace("model.", "ema.", 1)], expected)


def test_a_resume_that_freezes_what_was_trained_says_so(run_ranks, config: str) -> None:
    run_ranks(train_rank, 2, {}, ["training.train_iters=2"], config)
    frozen = ["training.load=auto", "model.freeze=[blocks.0]"]
    with pytest.raises(
        AssertionError, match=r"optimizer state of 2 parameters .*blocks.0.bias, blocks.0.weight.*freeze"
    ):
        run_ranks(train_rank, 2, {}, frozen, config)
    run_ranks(train_rank, 2, {}, [*frozen, "training.no_load_optim=true", "training.train_iters=3"], config)


def test_a_changed_learning_rate_takes_effect_on_resume(run_ranks, config: str) -> None:
    """B014: the configuration decides, the log says so, and the logged rate is the optimizer's."""
    run_ranks(train_rank, 2, {}, ["training.train_iters=4"], config)
    resumed = ["training.load=auto", "training.lr=0.005", "training.train_iters=8"]
    records = run_ranks(train_rank, 2, {}, resumed, config)[0]
    assert trace(records, "lr") == [0.02] * 4 + [0.005] * 4


def test_differences_between_configurations_say_what_they_mean() -> None:
    before = "training: {lr: 0.1, log_interval: 1, micro_batch_size: 2}\nparallel: {ulysses_parallel_size: 1}\n"
    now = "training: {lr: 0.2, log_interval: 5, micro_batch_size: 1}\nparallel: {ulysses_parallel_size: 2}\n"
    found = {d.key: (d.before, d.now, d.effect) for d in compare_configs(before, now)}
    assert found == {
        "training.lr": (0.1, 0.2, "changes the run"),
        "training.log_interval": (1, 5, "none"),
        "training.micro_batch_size": (2, 1, "rounding"),
        "parallel.ulysses_parallel_size": (1, 2, "rounding"),
    }
    assert compare_configs(before, before) == []


def test_a_folder_with_another_runs_checkpoints_is_refused_before_the_first_step(run_ranks, config: str) -> None:
    """B020: nothing of the other run is deleted, and nothing of it is taken for ours."""
    run_ranks(train_rank, 2, {}, ["training.train_iters=4"], config)
    run = Path(config).parent / "run"
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(AssertionError, match="iter_0000004, which this run did not write"):
        run_ranks(train_rank, 2, {}, ["training.train_iters=2"], config)
    assert sorted(path.name for path in run.iterdir()) == before
