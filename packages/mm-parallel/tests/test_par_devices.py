"""Builds of torch that are made for another machine than the one they run on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from other_builds import pretend, site_folder
from torch import nn

from mm_parallel import ActivationOffloadPlan, accelerator, default_device_type, device_count, process_group_backend
from mm_parallel.activations.activation_offload import ActivationOffload

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    accelerator.cache_clear()
    yield
    accelerator.cache_clear()


@pytest.mark.parametrize(
    ("built_for", "devices", "said"),
    [
        ("cuda", 0, "this torch is built for cuda, but no such device is here: everything runs on the CPU"),
        ("xpu", 0, "this torch is built for xpu, but no such device is here: everything runs on the CPU"),
        ("mps", 1, "there is no sharded training on mps: everything runs on the CPU"),
    ],
)
def test_what_isn_t_there_or_can_t_shard_falls_back_to_the_cpu_and_says_so(
    built_for: str,
    devices: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pretend(built_for, devices=devices, patch=monkeypatch.setattr)
    with caplog.at_level(logging.INFO):
        assert [default_device_type(), default_device_type()] == ["cpu", "cpu"]
    assert (accelerator(), device_count()) == (None, 0)
    assert [record.message for record in caplog.records] == [said], "once"
    assert process_group_backend(default_device_type()) == "gloo"


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cuda", devices=3, patch=monkeypatch.setattr)
    assert (accelerator(), default_device_type(), device_count()) == (torch.device("cuda"), "cuda", 3)


def test_activations_are_offloaded_on_the_cpu_of_such_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory counts as the device's where the CPU computes; nothing is pinned, which would need a driver."""
    pretend("cuda", patch=monkeypatch.setattr)
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64)
    module(x).sum().backward()
    expected = module[0].weight.grad.clone()
    module.zero_grad()
    offload = ActivationOffload(ActivationOffloadPlan(apply_modules=("x",), min_bytes=1))
    offload.around(module.forward)(x).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, expected, rtol=0, atol=0)


def test_the_readme_s_example_runs_on_such_a_build(tmp_path: Path) -> None:
    example = next(re.finditer(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))[1]
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    site = site_folder(tmp_path / "site", "cuda")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
