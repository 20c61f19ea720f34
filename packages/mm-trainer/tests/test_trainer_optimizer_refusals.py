"""Optimizers that don't suit the installation, the model or the checkpoint are refused, with key and line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cfg_helpers import CONTAINER, SINGLE, environment, line_of, run_cli, write
from optimizer_models import build, run

from mm_trainer.commands.check import check
from mm_trainer.config import load_config, resolve
from mm_trainer.errors import ConfigError, InputError


def test_another_optimizer_s_state_is_refused() -> None:
    net, optimizer = build("adamw")
    run(net, optimizer, range(1))
    _, other = build("muon")
    with pytest.raises(
        InputError,
        match=r"state of net\.blocks\.0\.weight is exp_avg, exp_avg_sq, step, but training\.optimizer: muon keeps "
        r"momentum_buffer: was the optimizer changed\? training\.no_load_optim: true resumes with a fresh one",
    ):
        other.allocate_state(optimizer.state())


def refused(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError, match=".") as caught:
        check(load_config(write(folder, text), overrides, environment=environment(folder)), 2, require_files=True)
    return caught.value


def test_a_missing_torchao_is_refused_before_anything_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SINGLE + "  optimizer: adamw_8bit\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torchao, which is not installed: pip install 'mm-trainer\[torchao\]'") as e:
        resolve(load_config(write(tmp_path, text), environment=environment(tmp_path)), 2)
    assert (e.value.key, e.value.line) == ("training.optimizer", line_of(text, "optimizer: adamw_8bit"))


def test_a_missing_torchao_ends_the_command_with_code_2(tmp_path: Path) -> None:
    text = SINGLE + "  optimizer: adamw_8bit\n"
    hidden = "import sys; sys.modules['torchao'] = None; from mm_trainer.cli import main; main()"
    done = run_cli(["train", write(tmp_path, text)], tmp_path, python=("-c", hidden))
    assert done.code == 2, done.err
    assert f"config.yaml:{line_of(text, 'optimizer: adamw_8bit')}: training.optimizer: adamw_8bit needs" in done.err
    assert "Traceback" not in done.err


def test_stochastic_rounding_of_fp32_weights_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, CONTAINER, "training.optimizer=adamw_sr")
    assert error.key == "training.optimizer"
    assert "predictor has none; set model.models.predictor.dtype: bf16, or take adamw" in error.message
    check(
        load_config(
            write(tmp_path, CONTAINER),
            ["training.optimizer=adamw_sr", "model.models.predictor.dtype=bf16"],
            environment=environment(tmp_path),
        ),
        2,
        require_files=True,
    )


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["training.muon_params=[blocks]"], "training.muon_params", "only read by `optimizer: muon`, and it is adamw"),
        (["training.muon_momentum=0.9"], "training.muon_momentum", "only read by `optimizer: muon`, and it is adamw"),
        (["training.optimizer=muon", "training.muon_params=[bias]"], "training.muon_params", "is a matrix"),
        (["training.optimizer=muon", "training.muon_params=[blcks]"], "training.muon_params.0", "nearest: blocks"),
        (
            ["training.optimizer=muon", "model.freeze=[weight]"],
            "training.optimizer",
            "and there is none to train; name some in training.muon_params, or take adamw",
        ),
        (["training.optimizer=adamw8bit"], "training.optimizer", "adamw_8bit"),
    ],
)
def test_what_doesn_t_fit_is_refused_with_its_key(tmp_path: Path, overrides: list[str], key: str, said: str) -> None:
    error = refused(tmp_path, SINGLE, *overrides)
    assert error.key == key
    assert said in str(error)
