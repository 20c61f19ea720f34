"""Training from the conditions cache equals training from clips, and builds no encoder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbers_close import FP32_BLOCK
from rank_training import PRELOAD, RECIPE, trace, train_rank
from test_integration_training import settings
from workspace import Workspace

SCRIPT = Path(sys.executable).parent / "mm-trainer"


def train_and_describe(rank: int, world_size: int, environ: dict[str, str], overrides: list[str]) -> dict[str, Any]:
    """Train; which sub-models were never given memory?"""
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    os.environ.update(environ)
    config = resolve(load_config(RECIPE, overrides), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    with engine.services.metrics:
        engine.train()
    return {name: all(p.is_meta for p in model.parameters()) for name, model in engine.model.get_sub_models().items()}


@pytest.mark.numeric
@pytest.mark.slow
def test_the_loss_trace_is_that_of_training_from_clips(run_ranks, workspace: Workspace, tmp_path: Path) -> None:
    clips = settings(tmp_path / "clips", steps=6, micro=2, **{"training.val_interval": 6})
    expected = run_ranks(train_rank, 2, workspace.environ, clips, preload=PRELOAD)[0]

    cached = settings(tmp_path / "cached", steps=6, micro=2, **{"training.val_interval": 6})
    cached += [f"data.cache={tmp_path / 'cache'}"]
    command = [str(SCRIPT), "cache", RECIPE, *cached, "--nproc-per-node", "2"]
    result = subprocess.run(
        command, env={**os.environ, **workspace.environ}, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("4 samples encoded, 0 were there") == 2, "training and validation set"
    on_meta = run_ranks(train_and_describe, 2, workspace.environ, cached, preload=PRELOAD)[0]
    assert on_meta == {"ae": True, "text_encoder": True, "predictor": False}

    from rank_training import read_metrics

    records = read_metrics(tmp_path / "cached")
    np.testing.assert_allclose(trace(records), trace(expected), rtol=FP32_BLOCK)
    one, two = ([r["loss"] for r in run if r["kind"] == "validation"] for run in (records, expected))
    assert len(one) == 2
    np.testing.assert_allclose(one, two, rtol=FP32_BLOCK)
