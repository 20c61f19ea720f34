"""The SLURM script, with stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cfg_helpers import TESTS

SCRIPT = TESTS.parent / "examples" / "train.slurm"
COMMANDS = {
    "scontrol": 'if [[ $1 == show ]]; then printf "node7\\nnode8\\n"; else echo "$*" >> scontrol.log; fi\n',
    "srun": 'shift; exec "$@"\n',
    "mm-trainer": (
        'trap "touch saved; exit 0" TERM\necho "$*" > arguments\nwhile [[ -e running ]]; do sleep 0.05; done\n'
    ),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with the stand-ins; the training runs as long as the file ``running`` is there."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    return tmp_path


def submit(cluster: Path, job: int, *arguments: str) -> subprocess.Popen[bytes]:
    variables = {"SLURM_JOB_ID": str(job), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment = {**os.environ, **variables, "SLURM_GPUS_ON_NODE": "8", "PATH": f"{cluster}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", str(SCRIPT), *arguments], cwd=cluster, env=environment)


def test_every_node_runs_the_launcher(cluster: Path) -> None:
    """B102: jobs that share a machine get a port each."""
    assert submit(cluster, 123, "c.yaml", "training.lr=1").wait(timeout=30) == 0
    assert (cluster / "arguments").read_text().split() == [
        *("train", "c.yaml", "training.lr=1", "training.load=auto", "--nproc-per-node", "8", "--nnodes", "2"),
        *("--rdzv-endpoint", "node7:20123", "--rdzv-id", "123"),
    ]
    submit(cluster, 124, "c.yaml").wait(timeout=30)
    assert "node7:20124" in (cluster / "arguments").read_text()
    assert not (cluster / "scontrol.log").exists()


def test_the_job_saves_and_is_queued_again_before_its_limit(cluster: Path) -> None:
    (cluster / "running").touch()
    job = submit(cluster, 125, "c.yaml")
    deadline = time.monotonic() + 30
    while not (cluster / "arguments").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # the script sets its own trap right after starting the launcher
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 0
    assert (cluster / "saved").exists()
    assert (cluster / "scontrol.log").read_text() == "requeue 125\n"
