"""The root README's configuration is one that starts."""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from rank_training import PRELOAD, trace, train_rank
from test_integration_demo import SCRIPT
from workspace import Workspace

README = Path(__file__).resolve().parents[1] / "README.md"


def write_run(folder: Path) -> Path:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    path = folder / "run.yaml"
    path.write_text(block, encoding="utf-8")
    return path


def test_the_run_of_the_readme_passes_its_check(tmp_path: Path, workspace: Workspace) -> None:
    write_run(tmp_path)
    (tmp_path / "clips").symlink_to(workspace.clips)
    # The tiny weights take what the real ones take; since they are there, shapes and sizes are checked too.
    result = subprocess.run(
        [SCRIPT, "check", "run.yaml", "--world-size", "4", "--files"],
        cwd=tmp_path,
        env={**os.environ, **workspace.environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "4 ranks" in result.stdout


def test_the_plan_of_the_readme_trains_on_two_ranks(tmp_path: Path, workspace: Workspace, run_ranks: Any) -> None:
    """In bf16, with sizes for the tiny weights; nothing else is changed."""
    settings = {
        "data.dataset_param.data_path": workspace.clips / "metadata.csv",
        "data.dataset_param.num_frames": 5,
        "data.dataset_param.buckets": "[[48, 64]]",
        "data.dataloader_param.num_workers": 0,
        "training.train_iters": 2,
        "training.save": tmp_path / "run",
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = str(write_run(tmp_path))
    losses = trace(run_ranks(train_rank, 2, workspace.environ, overrides, config, preload=PRELOAD)[0])
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
