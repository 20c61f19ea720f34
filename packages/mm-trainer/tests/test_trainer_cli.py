"""The command line: answers, exit codes, what each rank prints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cfg_helpers import CONTAINER, SINGLE, Finished, run_cli, write

from mm_checkpoint.errors import SourceError
from mm_trainer import cli
from mm_trainer.commands import job as jobs
from mm_trainer.errors import ConfigError, DataError
from mm_trainer.launch.plan import LaunchPlan

Main = Callable[..., Finished]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Main:
    """``mm-trainer ARGUMENTS`` in this process, started in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["mm-trainer", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return Finished(int(caught.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Replaces the run itself; collects what it was called with."""
    from mm_trainer.commands import train as run

    calls: list[tuple[Any, dict[str, Any]]] = []

    def train(prepared: Any, **options: Any) -> int:
        calls.append((prepared.config, options))
        return 0

    monkeypatch.setattr(run, "train", train)
    return calls


# --- answers ------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['mm-trainer', '--help']\n"
        "from mm_trainer.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code\n"
        "heavy = [m for m in ('torch', 'numpy', 'pydantic', 'yaml') if m in sys.modules]\n"
        "print('HEAVY', heavy)"
    )
    done = run_cli([], tmp_path, python=("-c", code))
    assert "HEAVY []" in done.out


def test_check_shows_ranks_batch_and_sub_models(main: Main, tmp_path: Path) -> None:
    done = main("check", write(tmp_path, CONTAINER), "training.micro_batch_size=2", "--world-size", "64")
    assert done.code == 0, done.err
    assert "64 ranks = 1 replicas × 64 shards; 64 data × 1 ring × 1 ulysses" in done.out
    assert "global batch 128 = micro batch 2 × data 64 × accumulation 1" in done.out
    assert re.search(r"encoder\W+40\W+0\W", done.out)
    assert re.search(r"predictor\W+144\W+144\W", done.out)


def test_check_notes_what_train_refuses(main: Main, tmp_path: Path) -> None:
    config = write(tmp_path, SINGLE)
    override = "model.from_pretrained=${NOT_DEFINED_HERE}/weights"
    done = main("check", config, override)
    assert done.code == 0
    assert "note: command line: model.from_pretrained: the environment variable NOT_DEFINED_HERE is not def" in done.out
    for refused in (main("check", config, override, "--files"), main("train", config, override)):
        assert refused.code == 2
        assert refused.err.startswith("error: command line: model.from_pretrained: the environment variable")


def test_check_prints_the_schema(main: Main) -> None:
    done = main("check", "--schema")
    assert done.code == 0
    assert json.loads(done.out)["properties"]["training"]


def test_check_needs_a_configuration(main: Main) -> None:
    done = main("check")
    assert (done.code, done.err[:26]) == (2, "error: CONFIG is missing: ")


def test_check_reads_the_data(main: Main, tmp_path: Path) -> None:
    done = main("check", write(tmp_path, SINGLE), "data.dataset_param.samples=5", "--data")
    assert done.code == 0, done.err
    assert re.search(r"usable\W+5 of 5", done.out)
    assert (tmp_path / "contact_sheet.png").exists()


def test_recipes_models_env(main: Main) -> None:
    listed = main("recipes")
    assert listed.code == 0
    for line in listed.out.splitlines():
        name = line.split()[0]
        shown = main("recipes", "show", name)
        assert shown.code == 0
        assert "model_id" in shown.out
    models = main("models").out
    assert re.search(r"video +mm-trainer \(mm_trainer.data.video.dataset:VideoDataset\)", models)
    report = yaml.safe_load(main("env").out)
    assert report["packages"]["torch"]
    assert report["devices"]
    assert main("recipes", "show", "nothing").code == 2


def test_env_keeps_secrets(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = main("env").out
    assert "secret" not in out
    assert yaml.safe_load(out)["variables"]["HF_HUB_OFFLINE"] == "1"


# --- exit codes ---------------------------------------------------------------------------------------------------


def test_a_run_ends_with_0(main: Main, runs: list[Any], tmp_path: Path) -> None:
    assert main("train", write(tmp_path, SINGLE), "training.lr=2e-3").code == 0
    ((config, options),) = runs
    assert config.training.lr == 2e-3
    assert options == {"dry_run": False}


def test_a_dry_run_is_passed_on(main: Main, runs: list[Any], tmp_path: Path) -> None:
    assert main("train", write(tmp_path, SINGLE), "--dry-run").code == 0
    assert [options for _, options in runs] == [{"dry_run": True}]


def test_a_cache_is_made_in_a_folder_that_needn_t_exist(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mm_trainer.commands import cache as run_cache

    seen: list[Any] = []
    monkeypatch.setattr(run_cache, "cache", lambda prepared, **options: seen.append((prepared.config, options)) or 0)
    config = write(tmp_path, SINGLE)
    assert main("cache", config, "data.cache=new/cache", "--variants", "2").code == 0
    ((loaded, options),) = seen
    assert (loaded.data.cache, options) == (tmp_path / "new" / "cache", {"variants": 2})
    refused = main("train", config, "data.cache=not/made")
    assert refused.err == f"error: command line: data.cache: {tmp_path}/not/made doesn't exist\n"


@pytest.mark.parametrize("error", [DataError("no clips"), SourceError("no weights"), ConfigError("no", key="model")])
def test_bad_input_is_one_message_and_code_2(
    error: Exception, main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mm_trainer.commands import train as run

    def train(config: Any, **options: Any) -> int:
        raise error

    monkeypatch.setattr(run, "train", train)
    config = write(tmp_path, SINGLE)
    done = main("train", config)
    said = f"{config}:1: model: no" if isinstance(error, ConfigError) else str(error)
    assert (done.code, done.err) == (2, f"error: {said}\n")


def test_a_fault_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "from mm_trainer.commands import train as command\n"
        "def train(c, **o): raise KeyError('ours')\n"
        "command.train = train\n"
    )
    done = run_cli(["train", write(tmp_path, SINGLE), "training.plugin=[cfg_plugin, faulty]"], tmp_path)
    assert done.code == 1
    assert done.err.splitlines()[-1] == "KeyError: 'ours'"
    assert "typer/" not in done.err


@pytest.mark.parametrize(
    "arguments", [["train"], ["trian"], ["train", "c.yaml", "--nproc-per-node", "0"], ["check", "c.yaml", "--wrong"]]
)
def test_a_wrong_usage_is_code_2(main: Main, arguments: list[str]) -> None:
    done = main(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_several_nodes_need_a_place_to_meet(main: Main, tmp_path: Path) -> None:
    done = main("train", write(tmp_path, SINGLE), "--nnodes", "2")
    assert (done.code, "--rdzv-endpoint HOST:PORT" in done.err) == (2, True)


def test_the_parent_refuses_before_it_starts_ranks(main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_launch(*arguments: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(jobs, "launch", no_launch)
    config = write(tmp_path, CONTAINER)
    done = main("train", config, "parallel.fsdp_plan.apply_modules.0=enkoder", "--nproc-per-node", "2")
    assert done.code == 2
    assert "command line: parallel.fsdp_plan.apply_modules.0: 'enkoder' matches no module" in done.err


def test_the_launcher_gets_the_plan_and_returns_the_ranks_code(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def fake(plan: LaunchPlan, command: list[str]) -> int:
        seen.append((plan, command))
        return 2

    monkeypatch.setattr(jobs, "launch", fake)
    config = write(tmp_path, SINGLE)
    settings, ranks = (
        ("training.grace_time_s=5", "training.load=auto"),
        ("--nproc-per-node", "2", "--max-restarts", "3"),
    )
    done = main("train", config, *settings, *ranks, "--dry-run")
    assert done.code == 2
    ((plan, command),) = seen
    assert (plan.world_size, plan.max_restarts, plan.grace_time_s) == (2, 3, 5.0)
    assert command == ["-m", "mm_trainer", "train", config, *settings, "--dry-run"]
    done = main("train", config, *ranks)
    assert (done.code, len(seen)) == (2, 1)
    assert "--max-restarts: ranks that start again can only go on with training.load=auto" in done.err


# --- ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "supervised", "prints"), [("0", False, True), ("1", False, False), ("0", True, False)]
)
def test_one_rank_speaks(
    rank: str, supervised: bool, prints: bool, main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under torchrun rank 0 prints bad input; under our launcher the parent does; every rank leaves an error file."""
    report = tmp_path / "error.json"
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(report)}.items():
        monkeypatch.setenv(name, value)
    if supervised:
        monkeypatch.setenv("MM_TRAINER_SUPERVISED", "1")
    done = main("train", write(tmp_path, SINGLE), "training.lr=fast")
    assert done.code == 2
    assert done.err.startswith("error: command line: training.lr: ") if prints else done.err == ""
    data = json.loads(report.read_text())
    assert data["message"]["message"].startswith("ConfigError: command line: training.lr: ")
    assert data["message"]["errorCode"] == 2


def test_a_rank_checks_its_world_size(
    main: Main, runs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = main("train", write(tmp_path, SINGLE), "parallel.ulysses_parallel_size=2")
    assert (done.code, runs) == (2, [])
    assert "doesn't divide the 3 ranks" in done.err


# --- B095 ---------------------------------------------------------------------------------------------------------


def test_a_start_from_another_directory_means_other_paths(
    main: Main, runs: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B095: relative paths count from the directory of the start; a missing one is shown absolute."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "earlier").mkdir()
    config = write(tmp_path / "own", SINGLE)
    monkeypatch.chdir(tmp_path / "own")
    assert main("train", "config.yaml", "training.init_from=earlier").code == 0
    ((loaded, _),) = runs
    assert loaded.training.save == tmp_path / "own" / "run"
    monkeypatch.chdir("/")
    done = main("train", config, "training.init_from=earlier")
    assert (done.code, done.err) == (2, "error: command line: training.init_from: /earlier doesn't exist\n")
