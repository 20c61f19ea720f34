"""The figures of a log line: where the time went, what was sent, and what the host never waits for between lines."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rank_training import train_rank
from torch.utils._python_dispatch import TorchDispatchMode

from mm_parallel import ParallelMesh
from mm_trainer.commands.prepare import Prepared
from mm_trainer.commands.train import make_engine
from mm_trainer.config import bind, load_config, resolve
from mm_trainer.engine.loop import TrainEngine
from mm_trainer.metrics import timing
from mm_trainer.metrics.peaks import peak_tflops
from mm_trainer.metrics.timing import PhaseTimer
from mm_trainer.metrics.window import LogWindow, memory_figures

RECIPE = "recipe:toy/squares"
PHASES = ("data", "conditions", "forward", "backward", "optimizer", "validation", "save", "waiting")


def overrides(run: Path, **changes: Any) -> list[str]:
    return [f"training.save={run}", *(f"{key}={value}" for key, value in changes.items())]


def open_engine(world_size: int, settings: Sequence[str]) -> TrainEngine:
    config = resolve(load_config(RECIPE, settings), world_size)
    return make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))


# --- time ---------------------------------------------------------------------------------------------------------


class Clock:
    """Stands for the module `time` in the timer's: it goes on only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_phases_nest_and_count_no_moment_twice(clock: Clock) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.phase("forward"):
        clock.sleep(2)
        with timer.phase("conditions"):
            clock.sleep(5)
        clock.sleep(3)
    clock.sleep(1)
    wall, phases = timer.close()
    assert (wall, phases) == (11, {"forward": 5, "conditions": 5})
    assert timer.close()[1] == {}, "the next window begins empty"


def test_a_block_that_raises_ends_its_phase(clock: Clock) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with pytest.raises(ValueError, match="bad"), timer.phase("forward"):
        clock.sleep(1)
        raise ValueError("bad")
    clock.sleep(2)
    assert timer.close() == (3, {"forward": 1})


@pytest.mark.parametrize("together", [1, 2])
def test_the_split_adds_up_to_the_step(run_ranks, tmp_path: Path, together: int) -> None:
    """Conditions are a part of their own, whether they are made in the forward or ahead of it."""
    settings = overrides(tmp_path, **{"training.condition_mbs": together, "training.train_iters": 4})
    records = run_ranks(train_rank, 2, {}, settings, RECIPE)[0]
    assert ["conditions_time_s" in record for record in records] == [number % together == 0 for number in range(4)]
    for record in records:
        parts = [record.get(f"{name}_time_s", 0.0) for name in PHASES]
        assert sum(parts) == pytest.approx(record["step_time_s"], rel=1e-6)
        assert record["memory_peak_gib"] >= record["memory_gib"] > 0
        assert "mfu" not in record, "a CPU has no peak that we know"


def test_no_peak_is_made_up() -> None:
    assert peak_tflops(torch.device("cpu")) is None
    assert memory_figures()["memory_peak_gib"] > 0


# --- bytes --------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire_are_those_of_the_formula(run_ranks, tmp_path: Path) -> None:
    """Two ranks: gathers for forward and backward, one reduce-scatter, and the sums of the gradient norm."""
    records = run_ranks(train_rank, 2, {}, overrides(tmp_path, **{"training.train_iters": 3}), RECIPE)[0]
    assert "sent_gib_per_step" not in records[0], "measured in the second step"
    sent = {record["sent_gib_per_step"] * 2**30 for record in records[1:]}
    width, blocks, latent, text = 32, 2, 12, 16 * 32
    per_block = 3 * width**2 + 3 * width + width**2 + width + 4 * width**2 + 3 * width
    # The head's 12 rows and all others divide by 2: nothing is padded.
    trained = blocks * per_block + latent * width + width**2 + latent * width + latent
    # One rank's half: the frozen text encoder once, what is trained twice, and its gradients once.
    expected = 4 * (text + 2 * trained + trained) // 2
    (measured,) = sent
    assert 0 <= measured - expected <= 64, "beyond it only the norm's few numbers"


# --- no waiting for the device ------------------------------------------------------------------------------------

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::unique_dim", "aten::_unique2")
"""Operators whose result the host needs: on an accelerator each waits for the device."""
ON_THE_HOST = {
    "dataset.py:load": "the toy's samples are made in the loader",
    "loop.py:_micro_step": "sample keys stay on the host, also for setting the global generators",
    "randomness.py:keyed_generator": "and for the draws of a sample",
    "schedule.py:_cdf": "so do the draws of sigma; only the finished sigma is moved",
    "signals.py:poll": "requests are agreed on by a host all-reduce",
}
"""Those that a step makes on tensors which never were on the device."""


class HostReads(TorchDispatchMode):
    """Notes the innermost function of ours that every read happens in."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in READS:
            self.places.add(_place(sys._getframe()))
        return func(*args, **(kwargs or {}))


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if "/src/mm_" in path:
            return f"{Path(path).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def reads_of_a_step(rank: int, world_size: int, settings: Sequence[str]) -> tuple[set[str], set[str]]:
    """Reads in steps between log lines, and in what a log line adds."""
    engine = open_engine(world_size, settings)
    window = LogWindow(engine.mesh)
    engine.train_step(window)
    with HostReads() as between:
        for _ in range(2):
            engine.train_step(window)
            engine.services.requests.poll()
    with HostReads() as at_log:
        engine.guard.check()
        window.close(0.0)
    return between.places, at_log.places


@pytest.mark.parametrize("changes", [{}, {"training.gradient_accumulation_steps": 2, "training.ema.enable": "true"}])
def test_between_log_lines_the_host_reads_nothing_from_the_device(run_ranks, tmp_path: Path, changes: dict) -> None:
    for between, at_log in run_ranks(reads_of_a_step, 2, overrides(tmp_path, **changes)):
        assert between <= ON_THE_HOST.keys()
        assert "window.py:close" in at_log or "window.py:_mean_of_finite" in at_log, "the test sees reads"


# --- over many steps ----------------------------------------------------------------------------------------------


def test_two_runs_of_one_seed_log_the_same(run_ranks, tmp_path: Path) -> None:
    """B113: loss, loss per noise level, gradient norm, rate, samples; all figures but times and memory, to the bit."""
    changes = {
        "training.train_iters": 6,
        "training.val_interval": 3,
        "data.val_dataset_param.dataset_type": "toy_squares",
        "data.val_dataset_param.samples": 8,
    }
    logs = []
    for name in ("one", "two"):
        records = run_ranks(train_rank, 2, {}, overrides(tmp_path / name, **changes), RECIPE)[0]
        varying = ("time", "tflops_per_rank", "memory_gib", "memory_peak_gib")
        logs.append(
            [{k: v for k, v in r.items() if k not in varying and not k.endswith(("_s", "_time_s"))} for r in records]
        )
    assert logs[0] == logs[1]
    trained = [record for record in logs[0] if record["kind"] == "train"]
    assert len(logs[0]) - len(trained) == 3
    assert {"loss", "grad_norm", "lr", "samples"} <= trained[0].keys()
    assert sum(name.startswith("loss_sigma_") for record in trained for name in record) > 6


def memory_after_each(rank: int, world_size: int, settings: Sequence[str]) -> tuple[list[float], list[float]]:
    """MB resident after each of ten saves, and after each of five validations."""
    engine = open_engine(world_size, settings)
    engine.train_step(LogWindow(engine.mesh))

    def resident() -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but fragmented isn't held: without this, RSS wanders by 40 MB
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    saves, validations = [], []
    assert engine.services.checkpoints is not None
    for step in range(1, 11):
        engine.progress.step = step
        engine.services.checkpoints.save(engine.progress, engine.services.data_state())
        saves.append(resident())
    engine.services.checkpoints.close()
    for _ in range(5):
        engine._validate()
        validations.append(resident())
    return saves, validations


@pytest.mark.parametrize("background", ["false", "true"])
def test_saves_and_validations_leave_no_memory_behind(run_ranks, tmp_path: Path, background: str) -> None:
    """B108: flat from the second one on. A rank's state is 19 MB: one copy kept each time would add 150, and 76."""
    changes = {
        "training.save_async": background,
        "training.val_interval": 1,
        "data.val_dataset_param.dataset_type": "toy_squares",
        "data.val_dataset_param.samples": 8,
        "model.models.predictor.architecture": "{width: 256, heads: 4, layers: 6}",
        "model.models.text_encoder.width": 256,
    }
    for saves, validations in run_ranks(memory_after_each, 2, overrides(tmp_path, **changes)):
        assert max(saves[2:]) - saves[1] < 19, saves
        assert max(validations[1:]) - validations[0] < 19, validations
