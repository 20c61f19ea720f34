"""`mm-trainer check --forward` on whole families: the toy on real ranks, Wan cut down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from rank_training import PRELOAD, RECIPE
from test_integration_demo import SCRIPT
from workspace import Workspace


def check_wan(rank: int, world_size: int, environ: dict[str, str], overrides: list[str]) -> list[str]:
    from mm_trainer.testing import check_plugin

    os.environ.update(environ)
    return check_plugin(RECIPE, *overrides)


def test_wan_is_cut_down_and_passes(run_ranks, workspace: Workspace) -> None:
    (findings,) = run_ranks(check_wan, 1, workspace.environ, [], preload=PRELOAD, init_process_group=False)
    assert findings[0] == "cut down, with random weights: ae, text_encoder, predictor"
    assert [line.split(":")[0] for line in findings[1:4]] == ["forward and backward", "export", "param_dtype"]
    assert findings[-1].startswith("recompute o")


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    command = [SCRIPT, "check", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("layout", ["parallel.ulysses_parallel_size=2", "training.seed=1"])
def test_the_toy_passes_on_two_real_ranks(tmp_path: Path, layout: str) -> None:
    done = run_script(tmp_path, "recipe:toy/squares", layout, "--forward", "--world-size", "2")
    assert done.returncode == 0, done.stderr
    assert "loss and gradients equal" in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_mistake_on_two_real_ranks_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "by_rank.py").write_text(
        "import os, torch\n"
        "from mm_models_toy.models import ToyPredictor\n"
        "from mm_trainer.registry import register_model\n"
        "@register_model('by_rank')\n"
        "class ByRank(ToyPredictor):\n"
        "    def __init__(self, *shapes):\n"
        "        super().__init__(*shapes)\n"
        "        self.register_buffer('rank', torch.tensor(int(os.environ.get('RANK', 0))), persistent=False)\n"
    )
    model = ["training.plugin=[by_rank]", "model.models.predictor.model_id=by_rank"]
    done = run_script(tmp_path, "recipe:toy/squares", *model, "--forward", "--world-size", "2")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("differ between ranks: predictor.rank;") == 1
    assert "Traceback" not in done.stderr
