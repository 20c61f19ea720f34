"""A run that is stopped, killed and started again ends where an unbroken one ends, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rank_training import read_metrics
from test_integration_training import read_tensors

SCRIPT = Path(sys.executable).parent / "mm-trainer"
SETTINGS = [
    "training.train_iters=60",
    "training.save_interval=10",
    "training.keep_last=-1",
    "training.lr_decay_style=cosine",
    "training.lr_warmup_iters=5",
    "training.ema.enable=true",
    "training.ema.decay=0.9",
    "training.load=auto",
]


def command(run: Path, *more: str) -> list[str]:
    return [
        *[str(SCRIPT), "train", "recipe:toy/squares", f"training.save={run}", *SETTINGS],
        *["--nproc-per-node", "2", *more],
    ]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], timeout: float = 180) -> None:
    """Until the log holds ``step``."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (run / "logs" / "metrics.jsonl").exists() and any(r["step"] >= step for r in read_metrics(run)):
            return
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in {timeout} s")


def rank_processes(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children if b"mm_trainer" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # read_tensors means to
def test_sigterm_and_kill_and_restart_change_nothing(tmp_path: Path) -> None:
    """60 steps = some + SIGTERM to the launcher + some + kill -9 of one rank and automatic restart + the rest."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(whole), check=True, timeout=300)

    first = subprocess.Popen(command(broken))
    wait_for_step(broken, 15, first)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 0, "a stop that was asked for is no failure"
    stopped_at = max(int(path.name[5:]) for path in broken.glob("iter_*"))
    assert 15 <= stopped_at < 60

    second = subprocess.Popen(command(broken, "--max-restarts", "1"))
    wait_for_step(broken, min(stopped_at + 15, 55), second)
    os.kill(rank_processes(second.pid)[1], signal.SIGKILL)
    assert second.wait(timeout=240) == 0

    one, two = (read_tensors(run / "iter_0000060") for run in (whole, broken))
    assert one.keys() == two.keys()
    assert any(name.startswith("ema.") for name in one)
    for name, tensor in one.items():
        assert np.array_equal(tensor, two[name]), name
    last = {record["step"]: record["loss"] for record in read_metrics(broken)}
    assert last == {record["step"]: record["loss"] for record in read_metrics(whole)}
