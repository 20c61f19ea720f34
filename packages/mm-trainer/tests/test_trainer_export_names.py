"""What the manifest tells an export: names below the weight root, ties, folders."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from safetensors.torch import load_file
from torch import nn

from mm_checkpoint import CheckpointManager, export, read_manifest
from mm_trainer.contracts import BaseModel, ModelSpec
from mm_trainer.engine.build import BuiltModel
from mm_trainer.engine.checkpoint import CheckpointIO, Progress
from mm_trainer.errors import InputError


class Tied(nn.Module):
    """A table under two names, the second of which is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.out.weight = self.embedding.weight


class Wrapper(BaseModel):
    """The file's model two levels down, and a layer of the wrapper's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": Tied()})
        self.extra = nn.Linear(3, 3)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls()

    def weight_root(self) -> nn.Module:
        return self.inner["net"]


def save(model: BaseModel, folder: Path, ties: dict[str, str] | None = None) -> dict[str, Any]:
    """Checkpoint a single model; returns its entry in the manifest."""
    spec: Any = SimpleNamespace(name="model", key="model", weights=None, architecture=None)
    loads: Any = {} if ties is None else {"": SimpleNamespace(source_dtypes={}, ties=ties)}
    built = BuiltModel(model, {"": model}, ("",), {"": spec}, loads=loads)
    with CheckpointManager(folder, async_save=False) as manager:
        CheckpointIO(manager, built, {}, resolved_config="").save(Progress(), {})
    entry: dict[str, Any] = read_manifest(folder / "iter_0000000")["sub_models"]["model"]
    return entry


def test_names_are_those_below_the_root_and_a_tie_has_the_first_of_its_names(tmp_path: Path) -> None:
    entry = save(Wrapper(), tmp_path / "run")
    assert (entry["prefix"], entry["ties"]) == ("inner.net.", {"out.weight": "embedding.weight"})
    (folder,) = export(tmp_path / "run", tmp_path / "out")
    assert list(load_file(next(folder.glob("*.safetensors")))) == ["embedding.weight"]


def test_a_tie_that_came_under_another_name_goes_back_under_it(tmp_path: Path) -> None:
    entry = save(Wrapper(), tmp_path / "run", ties={"embedding.weight": "out.weight"})
    assert entry["ties"] == {"embedding.weight": "out.weight"}


def test_what_is_trained_outside_the_root_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        save(Wrapper(), tmp_path / "run")
    assert "2 trained parameters lie outside weight_root()" in caplog.text
    assert "extra.bias, extra.weight" in caplog.text


def test_a_root_from_elsewhere_is_refused(tmp_path: Path) -> None:
    model = Wrapper()
    elsewhere = Tied()
    model.weight_root = lambda: elsewhere  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"Wrapper\): weight_root\(\) must return a module of the model"):
        save(model, tmp_path / "run")


PLUGIN = """
from torch import nn
from mm_checkpoint import KeyMap, register_key_map
from mm_trainer.contracts import BaseModel
from mm_trainer.registry import register_model

register_key_map(KeyMap("renamed_here", rules=[("published.{p*}", "layer.{p*}")]))

@register_model("renamed")
class Renamed(BaseModel):
    key_map = "renamed_here"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
"""


def test_a_module_registers_a_key_map_for_training_and_for_exports(tmp_path: Path) -> None:
    """In another process too, where the module has to be named."""
    (tmp_path / "renaming.py").write_text(PLUGIN, encoding="utf-8")
    code = (
        "from pathlib import Path; from renaming import Renamed; from test_trainer_export_names import save\n"
        "save(Renamed(), Path('run'))"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert run("-c", code).returncode == 0
    export_it = ("-c", "from mm_checkpoint.cli import main; main()", "export", "run", "out")
    failed = run(*export_it)
    assert failed.returncode == 2
    assert "no key map 'renamed_here'" in failed.stderr
    assert "--plugin MODULE" in failed.stderr
    done = run(*export_it, "--plugin", "renaming")
    assert done.returncode == 0, done.stderr
    assert sorted(load_file(tmp_path / "out" / "model" / "model.safetensors")) == ["published.bias", "published.weight"]
