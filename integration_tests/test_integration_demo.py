"""The main job through its commands, shorter than `hatch run demo`, and starts that must be refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo import RECIPE, run_demo
from workspace import Workspace

SCRIPT = Path(sys.executable).parent / "mm-trainer"


def mm_trainer(
    *words: str, env: dict[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *words], capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}
    )


def test_the_demo_learns_resumes_exports_and_samples(tmp_path: Path) -> None:
    """Its own steps with a shorter training: the eval loss falls below 0.8 of what it was."""
    report = run_demo(tmp_path / "demo", steps=20, processes=2)
    assert report["ratio"] < 0.8
    exported = tmp_path / "demo" / "exported"
    assert (exported / "model_index.json").is_file()
    assert Path(report["loss curve"]).stat().st_size > 10_000
    assert count_frames(Path(report["sampled clip"])) == 17
    iterations = sorted(p.name for p in (tmp_path / "demo" / "run").glob("iter_*"))
    assert iterations == ["iter_0000010", "iter_0000020"], "the second start went on where the first ended"

    size = ["--height", "48", "--width", "64", "--frames", "9", "--steps", "2", "--dtype", "fp32"]
    prompts = ["--prompt", "A rabbit in a meadow, from the left", "--prompt", "A rabbit in a meadow, from the right"]
    where = ["--base", str(tmp_path / "demo" / "tiny_wan"), "--output", str(tmp_path / "samples")]
    result = mm_trainer("sample", str(tmp_path / "demo" / "run"), *size, *prompts, *where)
    assert result.returncode == 0, result.stderr
    clips = [Path(line) for line in result.stdout.splitlines()]
    assert [count_frames(clip) for clip in clips] == [9, 9], "B098: prompts that begin alike don't overwrite each other"


def count_frames(clip: Path) -> int:
    import av

    with av.open(str(clip)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_weight_source_that_lacks_a_key_stops_the_start(workspace: Workspace, tmp_path: Path) -> None:
    """B004: nothing is silently random; the message names the key and the folder, with no traceback."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "transformer_2"
    shutil.copytree(workspace.pipeline / "transformer_2", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["blocks.1.attn1.to_q.weight"]
    save_file(tensors, file)
    run = tmp_path / "run"
    words = [f"training.save={run}", f"model.models.predictor.from_pretrained={folder}", "training.train_iters=1"]
    result = mm_trainer("train", RECIPE, *words, env=workspace.environ)
    assert result.returncode == 2, result.stderr
    assert "missing: blocks.1.self_attn.q.weight" in result.stderr
    assert str(folder) in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(run.glob("iter_*"))


BAD = {
    "unknown key": ("training:\n  lerning_rate: 1\n  train_iters: 1\n", ["bad.yaml:", "training.lerning_rate", "lr"]),
    "wrong type": ("training:\n  train_iters: many\n", ["bad.yaml:", "training.train_iters", "many"]),
    "dead pattern": (
        'training: {train_iters: 1}\nparallel:\n  fsdp_plan:\n    apply_modules: ["predictor.block.{*}"]\n',
        ["bad.yaml:", "apply_modules", "predictor.block.{*}", "predictor.blocks"],
    ),
    "missing folder": (
        "training: {train_iters: 1}\nmodel:\n  models:\n    ae:\n      from_pretrained: /nowhere/vae\n",
        ["bad.yaml:", "model.models.ae.from_pretrained", "/nowhere/vae"],
    ),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("command", ["train", "check"])
def test_bad_input_is_one_message_with_file_and_line(
    workspace: Workspace, tmp_path: Path, fault: str, command: str
) -> None:
    """Exit code 2, no traceback, and no rank was started."""
    text, expected = BAD[fault]
    config = tmp_path / "bad.yaml"
    config.write_text(f"extends: {RECIPE}\n{text}", encoding="utf-8")
    options = ["--nproc-per-node", "2"] if command == "train" else ["--files"]
    result = mm_trainer(command, str(config), f"training.save={tmp_path / 'run'}", *options, env=workspace.environ)
    assert result.returncode == 2, result.stderr
    for words in expected:
        assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert "rank" not in result.stderr.lower()
    assert not (tmp_path / "run").exists()
