"""The root README's configuration is one that starts."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from test_integration_demo import mm_trainer
from workspace import Workspace

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_run_of_the_readme_passes_its_check(tmp_path: Path, workspace: Workspace) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(block)
    assert config["data"]["dataset_param"]["data_path"] == "clips/metadata.csv"
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    (tmp_path / "clips").symlink_to(workspace.clips)
    # The tiny model has two heads and takes what the real one takes; weights are there, so shapes are checked too.
    result = mm_trainer("check", str(tmp_path / "run.yaml"), "--world-size", "4", "--files", env=workspace.environ)
    assert result.returncode == 0, result.stderr
    assert "4 ranks" in result.stdout
