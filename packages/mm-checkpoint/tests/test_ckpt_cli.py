"""The command line: what it answers, with which exit code, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest

from mm_checkpoint import CheckpointManager, cli


@pytest.fixture
def mm_checkpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the entry point in this process; gives (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mm-checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out = capsys.readouterr()
        return int(exit_.value.code or 0), out.out, out.err

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()), shards=2)


def test_light_commands_import_no_torch(source: Path) -> None:
    """--help and inspect of safetensors: what would make them slow."""
    code = "import sys; from mm_checkpoint import cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["convert", "--help"], ["inspect", str(source)]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_help_names_every_command(mm_checkpoint: Any) -> None:
    code, out, _ = mm_checkpoint("--help")
    assert code == 0
    assert all(name in out for name in ("inspect", "convert", "verify", "export"))


def test_inspect(mm_checkpoint: Any, source: Path, tmp_path: Path) -> None:
    """A folder, a run, an iteration and a pipeline, for people and as json."""
    code, out, _ = mm_checkpoint("inspect", source)
    assert code == 0
    assert "diffusers, 10 tensors, 1,111 elements" in out
    assert "{0-1}" in out  # equal layers are one entry
    code, out, _ = mm_checkpoint("inspect", source, "--json")
    found = json.loads(out)
    assert found["tensors"]["embed.weight"] == {
        "shape": [13, 10],
        "dtype": "float32",
        "bytes": 520,
        "file": "diffusion_pytorch_model-00001-of-00002.safetensors",
    }
    assert found["dtypes"] == {"float32": 1111}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, toys.state_of(toys.make_toy(), step=3))
    (tmp_path / "run" / "iter_0000005").mkdir()
    _, out, _ = mm_checkpoint("inspect", tmp_path / "run")
    assert "tracker 3" in out
    assert "iter_0000003" in out
    assert "NOT COMPLETE" in out
    _, out, _ = mm_checkpoint("inspect", tmp_path / "run" / "iter_0000003", "--json")
    found = json.loads(out)
    assert found["values"] == ["train.step"]
    assert found["manifest"]["step"] == 3
    (tmp_path / "pipe" / "vae").mkdir(parents=True)
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "P", "vae": ["d", "V"]}')
    _, out, _ = mm_checkpoint("inspect", tmp_path / "pipe")
    assert "a pipeline (P) of vae" in out


def test_verify_exit_codes(mm_checkpoint: Any, source: Path, tmp_path: Path) -> None:
    assert mm_checkpoint("convert", source, tmp_path / "dcp", "--to", "dcp")[0] == 0
    code, out, _ = mm_checkpoint("verify", tmp_path / "dcp")
    assert (code, out) == (0, "1 checked, all well\n")
    chunk = tmp_path / "dcp" / "__0_0.distcp"
    chunk.write_bytes(chunk.read_bytes()[:-10] + b"0123456789")
    code, out, _ = mm_checkpoint("verify", tmp_path / "dcp")
    assert code == 2
    assert f"DAMAGED {chunk}: its bytes have changed" in out
    code, out, _ = mm_checkpoint("verify", tmp_path / "dcp", "--json")
    assert code == 2
    assert json.loads(out)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["inspect", "nowhere"], "nowhere: no such file or folder"),
        (["convert", "nowhere", "out", "--to", "dcp"], "nowhere: no such file or folder"),
        (["convert", "SRC", "out", "--to", "onnx"], "'onnx' is not one of hf, diffusers, dcp, safetensors"),
        (["convert", "SRC", "out", "--to", "hf", "--dtype", "fp7"], "'fp7' is no floating type"),
        (["convert", "SRC", "out", "--to", "hf", "--key-map", "nope"], "no key map 'nope'"),
        (["convert", "SRC", "out", "--to", "hf", "--max-shard-size", "big"], "'big' is not a number of bytes"),
        (["convert", "SRC", "SRC", "--to", "hf"], "already exists"),
        (["verify", "nowhere"], "nowhere: no such file or folder"),
        (["export", "nowhere", "out"], "nowhere: no such folder"),
        (["convert", "SRC"], "Missing argument"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_exits_with_2(mm_checkpoint: Any, source: Path, tmp_path: Path, arguments: Any, match: str) -> None:
    """One readable message on stderr, no traceback."""
    os.chdir(tmp_path)
    code, _, err = mm_checkpoint(*(str(source) if value == "SRC" else value for value in arguments))
    assert code == 2
    assert match in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
