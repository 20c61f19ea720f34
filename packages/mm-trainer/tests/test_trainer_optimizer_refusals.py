"""Optimizers that don't suit the installation, the model or the checkpoint are refused, with key and line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cfg_helpers import CONTAINER, SINGLE, environment, line_of, run_cli, write
from optimizer_models import build, run
from pydantic import Field
from torch import nn

from mm_trainer.commands.prepare import prepare
from mm_trainer.config import TrainingConfig, load_config, resolve
from mm_trainer.contracts import OptimizerRequest, Options
from mm_trainer.errors import ConfigError, InputError
from mm_trainer.optim.optimizers import build_optimizers, check_optimizer
from mm_trainer.registry import register_optimizer


def training(**changes: Any) -> TrainingConfig:
    return TrainingConfig(train_iters=1, **{"optimizer": "adamw", **changes})


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
        prepare(load_config(write(folder, text), overrides, environment=environment(folder)), 2, require_files=True)
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
    prepare(
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


class Descent(torch.optim.Optimizer):
    """An optimizer as a plugin brings it: it keeps nothing between steps."""

    found_inf: torch.Tensor | None = None

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                change = parameter.grad + group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * change * (1 - self.found_inf))


@register_optimizer("cfg_sgd")
class SgdFactory:
    class Options(Options):
        factor: float = Field(default=1.0, gt=0)

    def check(self, request: OptimizerRequest) -> None:
        if request.settings.lr > 10:
            raise ConfigError("this is no learning rate", key="training.lr")

    def build(self, prefix: str, request: OptimizerRequest) -> list[Descent]:
        factor = request.options.model_dump()["factor"]
        groups = request.groups(request.parameters[prefix])
        return [Descent([{**group, "lr_scale": group["lr_scale"] * factor} for group in groups], {"lr": 0.0})]


def test_an_optimizer_from_elsewhere_updates_by_its_own_rule() -> None:
    model = nn.Linear(2, 2, bias=False)
    before, config = model.weight.detach().clone(), training(optimizer="cfg_sgd", optimizer_options={"factor": 0.5})
    (optimizer,) = build_optimizers({"net": model}, config).values()
    model.weight.grad = torch.full((2, 2), 3.0)
    optimizer.step(0.1, torch.zeros(()))
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.05 * config.weight_decay) - 0.05 * 3.0)


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"optimizer_options": {"factor": -1}}, "training.optimizer_options.factor", "greater than 0"),
        ({"optimizer_options": {"faktor": 1}}, "training.optimizer_options.faktor", "not permitted"),
        ({"lr": 11.0}, "training.lr", "no learning rate"),
    ],
)
def test_its_own_rules_are_asked_before_a_run(changes: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_optimizer({"": nn.Linear(2, 2)}, training(**{"optimizer": "cfg_sgd", **changes}))
    assert caught.value.key == key


def test_the_built_in_optimizers_have_no_options() -> None:
    with pytest.raises(ConfigError, match="not permitted") as caught:
        check_optimizer({"": nn.Linear(2, 2)}, training(optimizer_options={"amsgrad": True}))
    assert caught.value.key == "training.optimizer_options.amsgrad"


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_weights_are_refused_where_they_barely_train(tmp_path: Path, kind: str, dtype: str) -> None:
    """At usual rates nearly every update is below the weights' rounding, which no figure of a log shows."""
    overrides = [f"training.optimizer={kind}", f"model.models.predictor.dtype={dtype}"]
    error = refused(tmp_path, CONTAINER, *overrides)
    assert error.key == "model.models.predictor.dtype"
    assert "set fp32 here" in error.message
    assert "adamw_sr" in error.message
    for remedy in (
        "model.models.predictor.dtype=fp32",
        "training.optimizer=adamw_sr" if dtype == "bf16" else "model.models.predictor.dtype=fp32",
        "training.optimizer_options={half_precision_weights: true}",
    ):
        configuration = load_config(write(tmp_path, CONTAINER), [*overrides, remedy], environment=environment(tmp_path))
        prepare(configuration, 2)


def test_frozen_half_precision_weights_are_nobody_s_business(tmp_path: Path) -> None:
    overrides = ["model.models.encoder.dtype=bf16"]
    prepare(load_config(write(tmp_path, CONTAINER), overrides, environment=environment(tmp_path)), 2)


@pytest.mark.parametrize(
    ("section", "rate"),
    [
        ({}, None),
        ({"decay": 0.5}, 0.5),
        ({"enable": True}, 0.9999),
        ({"enable": True, "decay": 0.5}, 0.5),
        ({"enable": False, "decay": 0.5}, None),
    ],
)
def test_an_average_is_kept_where_a_decay_is_given(section: dict[str, Any], rate: float | None) -> None:
    assert training(ema=section).ema.rate == rate
