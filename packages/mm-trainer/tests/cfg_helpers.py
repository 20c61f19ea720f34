"""Configurations as text, and the command line as a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_trainer.config import Environment

TESTS = Path(__file__).parent

SINGLE = """\
model:
  model_id: cfg_model
data:
  dataset_param:
    dataset_type: cfg_numbers
  dataloader_param: {num_workers: 0}
training:
  train_iters: 3
  lr: 1e-3
  save: run
  plugin: [cfg_plugin]
"""

CONTAINER = """\
parallel:
  fsdp_plan:
    apply_modules: ["encoder", "predictor.blocks.{*}"]
    param_dtype: fp32
model:
  model_id: cfg_container
  mode: plain
  models:
    encoder:
      model_id: cfg_model
      freeze: true
    predictor:
      model_id: cfg_model
      width: 8
data:
  dataset_param:
    dataset_type: cfg_numbers
    width: 8
  dataloader_param:
    num_workers: 0
training:
  train_iters: 3
  lr: 1e-3
  save: run
  plugin: [cfg_plugin]
features:
  recompute: true
  recompute_plan:
    apply_modules: ["predictor.blocks.{*}"]
"""


def environment(cwd: Path, **variables: str) -> Environment:
    """An environment that doesn't depend on this process's."""
    return Environment(variables, str(cwd), "/home/someone")


def write(folder: Path, text: str, name: str = "config.yaml") -> str:
    """Path of a new file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def line_of(text: str, part: str) -> int:
    """1-based line that holds ``part``, which must be in one line only."""
    (line,) = [i for i, content in enumerate(text.splitlines(), 1) if part in content]
    return line


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


def run_cli(
    arguments: Sequence[str],
    cwd: Path,
    *,
    timeout: float = 60,
    python: Sequence[str] = ("-m", "mm_trainer"),
    **env: str,
) -> Finished:
    """Run ``mm-trainer <arguments>`` in ``cwd``, with this folder's modules importable."""
    done = subprocess.run(
        [sys.executable, *python, *arguments],
        cwd=cwd,
        env=cli_environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def cli_environment(**env: str) -> dict[str, str]:
    """Variables for a subprocess."""
    return {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
