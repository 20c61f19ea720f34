"""The root README's configuration is one that starts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from test_integration_demo import SCRIPT
from workspace import Workspace

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_run_of_the_readme_passes_its_check(tmp_path: Path, workspace: Workspace) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
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
