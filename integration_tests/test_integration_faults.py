"""B104: one rank fails in the forward, in the data, in a save, or dies: the job ends soon, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_integration_weeks import rank_processes, wait_for_step

SCRIPT = Path(sys.executable).parent / "mm-trainer"
CONFIG = """
extends: recipe:toy/squares
model: {{model_id: faulty_container}}
data:
  dataset_param: {{dataset_type: faulty_squares}}
  dataloader_param: {{num_workers: 1}}
training: {{plugin: [faulty_plugin], train_iters: {steps}, save_interval: 2, save_async: {background}, save: {run}}}
"""


def start(tmp_path: Path, *, fault: str, steps: int = 6, background: str = "false") -> subprocess.Popen[str]:
    config = tmp_path / "faulty.yaml"
    config.write_text(CONFIG.format(run=tmp_path / "run", steps=steps, background=background), encoding="utf-8")
    support = str(Path(__file__).parent / "support")
    environ = {**os.environ, "PYTHONPATH": support, "FAULT": fault}
    command = [str(SCRIPT), "train", str(config), "--nproc-per-node", "2"]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward", "data", "save"])
def test_a_fault_on_one_rank_ends_the_job_with_its_error_on_top(tmp_path: Path, fault: str) -> None:
    started = time.monotonic()
    process = start(tmp_path, fault=fault)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert time.monotonic() - started < 90, "the start included"
    verdict = stderr[stderr.index("rank 1") :]
    words = {"forward": "a fault in the forward", "data": "a fault in the data set", "save": "a fault in the save"}
    assert words[fault] in verdict
    complete = [path for path in (tmp_path / "run").glob("iter_*") if (path / "manifest.json").exists()]
    assert not complete or fault != "save"


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    process = start(tmp_path, fault="none", steps=100_000, background="true")
    wait_for_step(tmp_path / "run", 3, process)
    victim = rank_processes(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - killed < 60
    assert process.returncode == 1
    assert "rank 1" in stderr and "SIGKILL" in stderr
