"""Runs on machines that lack what torch was built for, or have less of it than ranks were asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cfg_helpers import SINGLE, TESTS, run_cli, write
from other_builds import pretend, site_folder

from mm_parallel import accelerator
from mm_trainer.commands.env import environment_report
from mm_trainer.errors import InputError
from mm_trainer.launch.process import pick_device

WINDOWS = ["tools.profile.enable=true", "tools.profile.start_step=1", "tools.profile.end_step=1"]
WINDOWS += ["tools.memory_profile.enable=true"]


@pytest.mark.parametrize("launched", [False, True], ids=["one process", "two ranks"])
def test_a_run_starts_on_a_cuda_build_without_a_gpu(tmp_path: Path, launched: bool) -> None:
    """Two steps with every window open, since each asks the device; the fallback is said once."""
    site = site_folder(tmp_path / "site", "cuda")
    ranks = ["--nproc-per-node", "2"] if launched else []
    done = run_cli(
        ["train", write(tmp_path, SINGLE), *WINDOWS, *ranks],
        tmp_path,
        timeout=120,
        PYTHONPATH=os.pathsep.join([str(site), str(TESTS)]),
    )
    assert done.code == 0, done.err
    assert done.err.count("built for cuda, but no such device is here: everything runs on the CPU") == 1
    assert (tmp_path / "run" / "iter_0000003" / "manifest.json").is_file()


def test_more_ranks_than_devices_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cuda", devices=2, patch=monkeypatch.setattr)
    accelerator.cache_clear()
    try:
        with pytest.raises(InputError, match="rank 2 of this machine has no device .*: there are 2 of type cuda"):
            pick_device(2)
    finally:
        accelerator.cache_clear()


def test_the_environment_report_of_such_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cuda", patch=monkeypatch.setattr)
    accelerator.cache_clear()
    try:
        assert environment_report()["devices"] == ["cpu"]
    finally:
        accelerator.cache_clear()
