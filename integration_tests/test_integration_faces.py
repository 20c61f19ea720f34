"""What a user's type checker sees of the public names: their types, none of them ``Any``."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

FACES = [
    "mm_checkpoint",
    "mm_parallel",
    "mm_trainer",
    "mm_trainer.config",
    "mm_trainer.contracts",
    "mm_trainer.data",
    "mm_models_wan",
]
MODULES = [  # public as they are, without a face of their own
    "mm_checkpoint.errors",
    "mm_parallel.config",
    "mm_trainer.errors",
    "mm_trainer.pipelines.flow_match",
    "mm_trainer.pipelines.schedule",
    "mm_trainer.randomness",
    "mm_trainer.registry",
]
ROOT = Path(__file__).resolve().parents[1]


def public_names(module: str) -> list[str]:
    """``__all__``, or what a module without it defines without an underscore."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    tree = ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in defined if not name.startswith("_")]


def test_no_public_name_is_any_to_a_type_checker(tmp_path: Path) -> None:
    names = [(module, name) for module in FACES + MODULES for name in public_names(module)]
    assert len(names) > 100
    lines = [f"from {module} import {name} as n{i}\nreveal_type(n{i})" for i, (module, name) in enumerate(names)]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # With the project's own settings and cache, in which torch has been read already where types were checked before.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ".mypy.ini", str(tmp_path / "user.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    revealed = {
        int(number): kind for number, kind in re.findall(r'user.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    }
    assert len(revealed) == len(names), done.stdout
    untyped = [f"{m}.{n}" for i, (m, n) in enumerate(names) if revealed[2 * i + 2] == "Any"]
    assert not untyped, f"a type checker knows nothing of {untyped}"
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", FACES)
def test_a_lazy_face_says_the_same_to_people_and_to_type_checkers(module: str) -> None:
    """The block under TYPE_CHECKING, the table of homes and ``__all__`` name the same things at the same places."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8"))
    typed = {
        alias.name: str(node.module).removeprefix(f"{module}.")
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    tables = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME"
    ]
    if not tables:
        assert module == "mm_trainer", "a face without a table"  # two names that cost nothing
        return
    table = ast.literal_eval(tables[0])
    assert table == typed
    assert sorted(table) == loaded.__all__ == sorted(loaded.__all__)
