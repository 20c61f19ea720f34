"""The README's example is a program: it runs, alone, and it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
ONLY_US = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mm_trainer", "mm_checkpoint", "mm_models_wan"):
            raise ImportError(name + " is not installed")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("ranks", [2])
def test_the_example_trains_without_any_other_package_of_ours(tmp_path, ranks):
    (code,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "sitecustomize.py").write_text(ONLY_US)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command.append("train.py")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert out.returncode == 0, out.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", out.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "4 × blocks.{*}" in out.stdout


def test_the_source_names_no_sibling_and_no_model():
    """This package imports no other of ours, and knows no model's name."""
    for file in (PACKAGE / "src").rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"(?m)^\s*(import|from) mm_(?!parallel\b)", text), file
        assert not re.search(r"(?i)\b(wan|umt5|ltx|hunyuan)\b", text), file
