"""Runs on machines that lack what torch was built for, or have less of it than ranks were asked for."""

from __future__ import annotations

import json
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


def test_a_rank_without_a_device_ends_with_2_and_tells_its_launcher(tmp_path: Path) -> None:
    """The ranks that have a device know nothing of it; a launcher, ours or torchrun, shows what the file holds."""
    site, told = site_folder(tmp_path / "site", "cuda", devices=1), tmp_path / "error.json"
    done = run_cli(
        ["train", write(tmp_path, SINGLE)],
        tmp_path,
        PYTHONPATH=os.pathsep.join([str(site), str(TESTS)]),
        TORCHELASTIC_ERROR_FILE=str(told),
        **dict.fromkeys(["RANK", "LOCAL_RANK"], "1"),
        WORLD_SIZE="2",
    )
    assert done.code == 2, done.err
    said = json.loads(told.read_text())["mm_trainer"]["text"]
    assert said.startswith("rank 1 of this machine has no device of its own: there are 1 of type cuda")


def test_clips_made_on_the_cpu_of_such_a_build_say_so(tmp_path: Path) -> None:
    site = site_folder(tmp_path / "site", "cuda")
    command = (
        "from mm_parallel import default_device_type\n"
        "from mm_trainer import cli\n"
        "from mm_trainer.commands import sample\n"
        "sample.sample = lambda *_, **__: [default_device_type()]\n"
        "cli.app(['sample', 'folder', '--prompt', 'a rabbit'])\n"
    )
    done = run_cli([], tmp_path, python=("-c", command), PYTHONPATH=os.pathsep.join([str(site), str(TESTS)]))
    assert (done.code, done.out) == (0, "cpu\n"), done.err
    assert done.err.count("no such device is here: everything runs on the CPU") == 1


def test_the_environment_report_of_such_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cuda", patch=monkeypatch.setattr)
    accelerator.cache_clear()
    try:
        assert environment_report()["devices"] == ["cpu"]
    finally:
        accelerator.cache_clear()
