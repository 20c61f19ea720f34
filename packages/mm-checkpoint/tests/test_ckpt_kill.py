"""``kill -9`` during saves and conversions: a short version of ``scripts/kill_rounds.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kill_rounds.py"


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_costs_nothing_that_was_complete(tmp_path: Path, rounds: int) -> None:
    """In a process of its own, because it forks."""
    arguments = [sys.executable, str(SCRIPT), "--rounds", str(rounds), "--megabytes", "8", "--folder", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{rounds} kills" in done.stdout
