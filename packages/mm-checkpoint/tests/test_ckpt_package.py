"""The package as such: its names, its imports, its README."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mm_checkpoint

PACKAGE = Path(__file__).parents[1]


def test_public_names() -> None:
    """The surface is pinned, and every name of it can be looked up."""
    assert mm_checkpoint.__all__ == sorted(mm_checkpoint.__all__)
    assert set(mm_checkpoint.__all__) == {
        *("BadInputError", "CheckpointError", "CheckpointManager", "Concat", "Conversion", "KeyMap", "LoadReport"),
        *("Split", "Transpose", "Verification", "WeightSource", "WeightSourceConfig", "__version__", "convert"),
        *("export", "find_source", "get_key_map", "inspect", "list_key_maps", "load_weights", "read_manifest"),
        "register_key_map",
        *("resolve_source", "sniff_format", "source_digest", "verify"),
    }
    for name in mm_checkpoint.__all__:
        assert getattr(mm_checkpoint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mm_checkpoint.nothing


def test_every_module_imports() -> None:
    for module in pkgutil.iter_modules(mm_checkpoint.__path__, "mm_checkpoint."):
        importlib.import_module(module.name)


def test_light_modules_import_no_torch() -> None:
    """The package, its configuration and its errors come without torch."""
    code = "import sys, mm_checkpoint, mm_checkpoint.config, mm_checkpoint.errors, mm_checkpoint._weights.sources\n"
    code += "mm_checkpoint.resolve_source, mm_checkpoint.KeyMap, mm_checkpoint.sniff_format\n"
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_knows_no_sibling_and_no_model() -> None:
    """Design §1: no other mm_* package is imported, and no model's name appears in the source."""
    for path in (PACKAGE / "src").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"mm_(trainer|parallel|models)", text), path
        assert not re.search(r"\b(wan|umt5|ltx)[\d_]*\b", text, re.IGNORECASE), path


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-alone example of the README, as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})
