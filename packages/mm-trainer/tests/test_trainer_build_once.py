"""A configuration is loaded, resolved, bound and built on meta once in a process, however it is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cfg_helpers import CONTAINER, TESTS, run_cli, write

# Counts, in every process below this folder on PYTHONPATH, how often a class's structure is built and a configuration
# loaded, resolved and bound; each process leaves its counts in a file of its own.
COUNTING = """
import atexit, collections, functools, json, os, sys
from pathlib import Path

counts = collections.Counter()

def counted(module, name):
    original = getattr(module, name)
    @functools.wraps(original)
    def call(*arguments, **options):
        counts[name] += 1
        return original(*arguments, **options)
    setattr(module, name, call)

import mm_trainer.config.loading, mm_trainer.config.resolving, mm_trainer.config.binding
counted(mm_trainer.config.loading, "load_config")
counted(mm_trainer.config.resolving, "resolve")
counted(mm_trainer.config.binding, "bind")
import cfg_plugin
original = cfg_plugin.CfgModel.from_config.__func__
def from_config(cls, spec):
    counts["built " + spec.name] += 1
    return original(cls, spec)
cfg_plugin.CfgModel.from_config = classmethod(from_config)

def leave():
    rank = os.environ.get("RANK", "parent")
    Path(os.environ["COUNTS"], rank + ".json").write_text(json.dumps(counts))
atexit.register(leave)
"""

ONCE = {"load_config": 1, "resolve": 1, "bind": 1, "built encoder": 1, "built predictor": 1}


@pytest.mark.parametrize(
    ("arguments", "python", "expected"),
    [
        (["check"], ("-m", "mm_trainer"), {"parent": ONCE}),
        (["train"], ("-m", "mm_trainer"), {"parent": ONCE}),
        (["train", "--nproc-per-node", "2"], ("-m", "mm_trainer"), {"parent": ONCE, "0": ONCE, "1": ONCE}),
        (
            ["train"],
            ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--module", "mm_trainer"),
            {"0": ONCE, "1": ONCE},
        ),
    ],
    ids=["check", "one process", "our launcher", "torchrun"],
)
def test_each_process_does_it_once(
    tmp_path: Path, arguments: list[str], python: tuple[str, ...], expected: dict[str, dict[str, int]]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(COUNTING, encoding="utf-8")
    (tmp_path / "counts").mkdir()
    command, *flags = arguments
    done = run_cli(
        [command, write(tmp_path, CONTAINER), *flags],
        tmp_path,
        timeout=180,
        python=tuple(
            os.path.join(os.path.dirname(__import__("sys").executable), p) if p == "python" else p for p in python
        ),
        PYTHONPATH=os.pathsep.join([str(site), str(TESTS)]),
        COUNTS=str(tmp_path / "counts"),
    )
    assert done.code == 0, done.err
    counts = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "counts").glob("*.json")}
    found = {name: {key: n for key, n in counts[name].items() if key in ONCE} for name in expected}
    assert found == expected
