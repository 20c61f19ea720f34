"""What a plugin's author gets wrong is one line with distribution and class, and exit code 2, in either command."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from mistaken_plugin import ENTRY_POINTS

MISTAKES: dict[str, tuple[str, str]] = {
    "vector_loss": (
        "model",
        r"VectorLoss\): the loss must be one floating-point number.*bfloat16 of shape \(2,\)",
    ),
    "integer_loss": ("model", r"IntegerLoss\): the loss must be one floating-point number.*torch.int64"),
    "number_loss": ("model", r"NumberLoss\): the loss must be a tensor, got a float"),
    "detached_loss": ("model", r"DetachedLoss\): the loss doesn't depend on any trained parameter: it was detached"),
    "no_grad_loss": ("model", r"NoGradLoss\): the loss doesn't depend on any trained parameter"),
    "loss_in_dict": ("model", r"LossInDict\): .*an object with .loss, got a dict with an entry 'loss'"),
    "bare_loss": ("model", r"BareLoss\): .*an object with .loss, got a Tensor"),
    "fewer_keys": ("model", r"FewerKeys\): its forward can't be called.*'sample_key' \(the batch has: row, sample_key"),
    "other_keys": ("model", r"OtherKeys\): its forward can't be called.*'pixels' \(the batch has: row, sample_key"),
    "looks_up": ("model", r"LooksUp\): its forward looks for 'pixels', .*; the batch has: row, sample_key"),
    "raising": ("model", r"Raising\): from_config failed: KeyError: 'width' \(.*mistaken_plugin.py:\d+\)"),
    "no_structure": ("model", r"NoStructure\): from_config failed: NotImplementedError"),
    "raising_init": (
        "model",
        r"RaisingInit\): init_weights failed: AttributeError: .*'head' \(.*mistaken_plugin.py:\d+\)",
    ),
    "map_itself": ("model", r"MapItself\): key_map must be the name of a registered key map, got a KeyMap"),
    "map_unknown": ("model", "key map 'mistakn'"),
    "no_class": ("model", "mistaken-dist names 'mistaken_plugin', which isn't of the form package.module:Object"),
    "dotted": ("model", "mistaken-dist names 'mistaken_plugin.Right', which isn't of the form"),
    "alone": ("container", r"Abstract\) doesn't implement compute_loss, predict"),
    "undeclared": ("container", r"Undeclared.*must declare checkpoint_submodels"),
    "raising_container": ("container", r"RaisingContainer\): the constructor failed: ZeroDivisionError"),
    "no_length": ("data", r"NoLength\): a data set needs __len__"),
    "raising_rows": ("data", r"RaisingRows\): opening the data set failed: OSError: no such bucket"),
    "tuple_rows": ("data", "TupleRows.load must return a mapping of tensors, got a tuple"),
}


FOUND_BY_A_STEP: dict[str, tuple[str, str]] = {
    "no_cast": ("model", r"NoCast\): a forward and backward under param_dtype: bf16 failed: .*same dtype"),
    "cast_outside": ("model", r"CastOutside\): a forward and backward under param_dtype: bf16 failed: .*same dtype"),
    "own_dice": ("model", "recompute on: the step isn't the same: .*draw from a generator of its own"),
    "lonely": ("pair", r"Lonely\): none of the 2 trained parameters of other received a gradient"),
    "forgetful": ("model", r"Forgetful\): 1 tensor\(s\) of the model were never filled, .*: layer.bias"),
    "outside_root": (
        "model",
        r"2 of 4 tensors differ after an export and a load: layer.bias, layer.weight; does weight_",
    ),
    "raising_load": (
        "data",
        r"RaisingLoad\): reading the first micro-batch failed: KeyError: 'caption' \(.*plugin.py:",
    ),
    "mixed_types": ("data", r"samples of one batch differ in the type of width: NoneType, int"),
    "not_a_number": ("model", r"NotANumber\): the loss of the first micro-batch is inf"),
}


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin as pip leaves it: metadata and a module."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "mistaken_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mistaken-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(Path(__file__).with_name("mistaken_plugin.py"), folder)
    return folder


def configuration(mistake: str, save: Path) -> Mapping[str, Any]:
    kind = (MISTAKES | FOUND_BY_A_STEP | {"right": ("model", "")})[mistake][0]
    model: dict[str, Any] = {"model_id": mistake if kind == "model" else "right"}
    if kind == "container":
        model = {"model_id": mistake, "models": {"predictor": {"model_id": "right"}}}
    if kind == "pair":
        model = {"model_id": mistake, "models": {"predictor": {"model_id": "right"}, "other": {"model_id": "right"}}}
    return {
        "parallel": {"fsdp_plan": {"apply_modules": ["predictor.layer" if "models" in model else "layer"]}},
        "model": model,
        "data": {
            "dataset_param": {"dataset_type": mistake if kind == "data" else "mistaken_rows"},
            "dataloader_param": {"num_workers": 0},
        },
        "training": {"micro_batch_size": 2, "train_iters": 1, "save": str(save), "save_async": False},
    }


def run_command(rank: int, world_size: int, folder: str, arguments: list[str]) -> tuple[int, str]:
    """The exit code of ``mm-trainer``, and what it wrote to stderr."""
    from mm_trainer.cli import main

    sys.path.insert(0, folder)
    sys.argv = ["mm-trainer", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


def run(run_ranks: Any, distribution: Path, config: Mapping[str, Any], *arguments: str) -> tuple[int, str]:
    file = distribution / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command, *flags = arguments
    return run_ranks(run_command, 1, str(distribution), [command, str(file), *flags], init_process_group=False)[0]


def test_the_plugin_without_a_mistake_trains(run_ranks, distribution: Path, tmp_path: Path) -> None:
    """So that what the others say comes from their mistakes."""
    code, said = run(run_ranks, distribution, configuration("right", tmp_path / "run"), "check", "--forward")
    assert code == 0, said
    assert "loss and gradients equal" in said
    assert not (tmp_path / "run").exists(), "a check writes nothing where the run would"
    code, said = run(run_ranks, distribution, configuration("right", tmp_path / "run"), "train")
    assert code == 0, said
    assert (tmp_path / "run" / "iter_0000001").is_dir()


@pytest.mark.parametrize("command", ["train", "check --forward"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(run_ranks, distribution: Path, tmp_path: Path, mistake: str, command: str) -> None:
    code, said = run(run_ranks, distribution, configuration(mistake, tmp_path / "run"), *command.split())
    assert code == 2, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(MISTAKES[mistake][1], errors[0]), errors[0]
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "iter_0000001").exists()


@pytest.mark.parametrize("mistake", FOUND_BY_A_STEP)
def test_what_only_a_step_can_tell(run_ranks, distribution: Path, tmp_path: Path, mistake: str) -> None:
    code, said = run(run_ranks, distribution, configuration(mistake, tmp_path / "run"), "check", "--forward")
    assert code == 2, said
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(FOUND_BY_A_STEP[mistake][1], error), error


def check_twice(rank: int, world_size: int, folder: str, files: list[str]) -> list[str]:
    from mm_trainer.errors import InputError
    from mm_trainer.testing import check_plugin

    sys.path.insert(0, folder)
    said = []
    for file in files:
        try:
            said += check_plugin(file)[-1:]
        except InputError as error:
            said.append(str(error))
    return said


def test_a_check_that_fails_leaves_nothing_for_the_next_one(run_ranks, distribution: Path, tmp_path: Path) -> None:
    """A plugin's test session has more than one test."""
    files = []
    for name in ("vector_loss", "right"):
        files.append(str(tmp_path / f"{name}.yaml"))
        Path(files[-1]).write_text(yaml.safe_dump(configuration(name, tmp_path / "run")), encoding="utf-8")
    first, second = run_ranks(check_twice, 1, str(distribution), files, init_process_group=False)[0]
    assert "the loss must be one floating-point number" in first
    assert second == "recompute on: loss and gradients equal"
