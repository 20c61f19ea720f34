"""Profiler windows, what the sub-models hold, the watchdog, and a dry run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_training import train_rank
from test_trainer_single_model import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


def test_a_profile_window_records_its_steps_on_its_ranks(run_ranks, config: str) -> None:
    window = [f"tools.profile.{key}" for key in ("enable=true", "start_step=3", "end_step=4", "ranks=[1]")]
    run_ranks(train_rank, 2, {}, window, config)
    (trace,) = (Path(config).parent / "run" / "profiling").iterdir()
    assert trace.name == "rank1_step4.json"
    names = [event.get("name", "") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    assert sum("AdamW.step" in name for name in names) == 2, "two steps were recorded"


def test_windows_that_outlast_the_run_are_written_at_its_end(config: str) -> None:
    """Of a whole process: a profiler that nobody stops takes it down at exit."""
    windows = [
        f"tools.{kind}.{key}" for kind in ("profile", "memory_profile") for key in ("enable=true", "end_step=99")
    ]
    windows += ["tools.profile.start_step=2", "training.train_iters=3"]
    result = subprocess.run(
        [Path(sys.executable).parent / "mm-trainer", "train", config, *windows],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    run = Path(config).parent / "run"
    assert "wrote the profile of steps 2 to 3" in result.stderr
    assert [path.name for path in (run / "profiling").iterdir()] == ["rank0_step3.json"]
    assert json.loads((run / "memory" / "rank0_step3.json").read_text(encoding="utf-8"))["step"] == 3


def test_the_memory_window_lists_what_each_sub_model_holds(run_ranks, config: str) -> None:
    run_ranks(train_rank, 2, {}, ["tools.memory_profile.enable=true", "tools.memory_profile.end_step=2"], config)
    (table,) = (Path(config).parent / "run" / "memory").glob("*.json")
    held = json.loads(table.read_text(encoding="utf-8"))["bytes"]["model"]
    # 157 fp32 parameters on two ranks; rank 0 holds the larger half of each tensor whose rows don't divide.
    assert 157 * 4 / 2 <= held["parameters"] <= 157 * 4 * 0.7
    assert held["gradients"] == 0, "dropped after the update"
    # Two moments per element, and one step counter per tensor.
    assert held["optimizer"] == 2 * held["parameters"] + 7 * 4


def hang_in_the_only_step(rank: int, world_size: int, config_file: str) -> None:
    """Rank 1 holds its data back until both ranks have shown their stacks; each rank's stderr is a file of its own.

    There is no other step: on a busy machine any of them may outlast half a second.
    """
    import time

    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    outputs = [Path(config_file).with_name(f"stderr{number}") for number in range(world_size)]
    os.dup2(os.open(outputs[rank], os.O_CREAT | os.O_WRONLY), 2)
    settings = ["training.step_timeout_s=0.5", "training.train_iters=1"]
    config = resolve(load_config(config_file, settings), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    batches = engine.batches

    def slow() -> Any:
        while rank == 1 and not all("Timeout" in output.read_text(encoding="utf-8") for output in outputs):
            time.sleep(0.05)
        yield from batches

    engine.batches = slow()
    with engine.services.metrics:
        engine.train()


def test_a_step_that_outlasts_its_limit_shows_the_stack_of_every_rank(run_ranks, config: str) -> None:
    """The rank that sleeps, and the one that waits for it in a collective; both go on afterwards."""
    run_ranks(hang_in_the_only_step, 2, config)
    waiting, sleeping = (Path(config).with_name(f"stderr{rank}").read_text(encoding="utf-8") for rank in (0, 1))
    assert waiting.count("Timeout (0:00:00.5") == sleeping.count("Timeout (0:00:00.5") == 1
    assert re.search(r"test_trainer_tools\.py.* in slow", sleeping)
    assert "in slow" not in waiting.split("Timeout", 1)[1].split("in train_step")[0]
    assert "in train_step" in waiting


def test_a_dry_run_takes_one_step_and_leaves_nothing(config: str) -> None:
    command = [str(Path(sys.executable).parent / "mm-trainer"), "train", config, "--dry-run"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert result.returncode == 0, result.stderr
    assert "train step=1 " in result.stderr and "train step=2 " not in result.stderr
    assert re.search(r"one step done, nothing saved; host memory peak \d+\.\d\d GiB", result.stderr)
    assert not (Path(config).parent / "run").exists()
