"""The engine's parts that need neither ranks nor a model: learning rate, condition batching, randomness, patterns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from mm_trainer.config import TrainingConfig
from mm_trainer.engine.conditions import ConditionBatcher
from mm_trainer.engine.coverage import GradientCoverage
from mm_trainer.errors import ConfigError, TrainingFault
from mm_trainer.optim.lr import LearningRate
from mm_trainer.optim.optimizers import build_optimizers
from mm_trainer.optim.parameters import match_parameters
from mm_trainer.randomness import keyed_generator, keyed_normal, keyed_uniform


def test_learning_rate_warms_up_then_decays_to_the_floor() -> None:
    rate = LearningRate(peak=1.0, floor=0.1, style="cosine", warmup_steps=2, total_steps=12)
    values = [rate.at(step) for step in range(13)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[7] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert values[12] == pytest.approx(0.1)
    assert rate.at(1000) == pytest.approx(0.1)


@pytest.mark.parametrize(("style", "middle"), [("constant", 1.0), ("linear", 0.5)])
def test_other_styles(style: str, middle: float) -> None:
    rate = LearningRate(peak=1.0, floor=0.0, style=style, warmup_steps=0, total_steps=10)
    assert rate.at(5) == pytest.approx(middle)


def test_condition_batching_encodes_equal_shapes_together_and_keeps_the_order() -> None:
    def batch(key: int, width: int) -> dict:
        return {"video": torch.full((2, width), float(key)), "sample_key": torch.tensor([2 * key, 2 * key + 1])}

    calls = []

    def prepare(stacked: dict) -> dict:
        calls.append(tuple(stacked["video"].shape))
        return {"latents": stacked["video"].sum(1)}

    plain = [batch(0, 3), batch(1, 4), batch(2, 3), batch(3, 4), batch(4, 3)]
    out = list(ConditionBatcher(plain, prepare, every=4))
    assert calls == [(4, 3), (4, 4), (2, 3)]
    assert [b["sample_key"].tolist() for b in out] == [b["sample_key"].tolist() for b in plain]
    assert [b["conditions"]["latents"].tolist() for b in out] == [[0, 0], [4, 4], [6, 6], [12, 12], [12, 12]]


@pytest.mark.numeric
def test_draws_depend_on_seed_stream_and_key_alone() -> None:
    keys = torch.tensor([7, 3, 7])
    noise = keyed_normal(1, "noise", keys, (2, 5))
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(noise[1:2], keyed_normal(1, "noise", keys[1:2], (2, 5))), "independent of the batch"
    assert not torch.equal(noise, keyed_normal(2, "noise", keys, (2, 5)))
    assert not torch.equal(noise, keyed_normal(1, "other", keys, (2, 5)))
    assert keyed_generator(1, "a", 23).initial_seed() != keyed_generator(12, "a", 3).initial_seed()


def test_keyed_uniform_is_uniform_over_keys() -> None:
    draws = keyed_uniform(0, "sigma", torch.arange(4000))
    assert draws.dtype == torch.float64
    histogram = torch.histc(draws.float(), bins=10, min=0, max=1)
    assert float(histogram.min()) > 320 and float(histogram.max()) < 480, "10 bins of 400 ± 4 sigma"


def test_a_parameter_pattern_means_a_name_a_module_or_a_tail() -> None:
    names = ["blocks.0.ffn.0.weight", "blocks.0.ffn.0.bias", "blocks.1.norm3.weight", "head.bias"]
    assert match_parameters(names, ["blocks.{*}"], key="x") == set(names[:3])
    assert match_parameters(names, ["bias"], key="x") == {names[1], names[3]}
    assert match_parameters(names, ["norm3.weight"], key="x") == {names[2]}
    with pytest.raises(ConfigError, match=r"no_decay_params\.0: pattern 'biass' matches no parameter; nearest: bias"):
        match_parameters(names, ["biass"], key="training.no_decay_params")


def coverage_of(model: nn.Module) -> tuple[GradientCoverage, dict[str, Any]]:
    return GradientCoverage(), build_optimizers({"net": model}, TrainingConfig(train_iters=1))


def test_a_sub_model_that_no_gradient_reaches_ends_the_run_in_its_first_step() -> None:
    coverage, optimizers = coverage_of(nn.Linear(2, 2))
    with pytest.raises(TrainingFault, match=r"none of the 2 trained parameters of net .*net\.bias, net\.weight"):
        coverage.check(["net"], optimizers)


def test_single_parameters_that_no_gradient_reaches_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    coverage, optimizers = coverage_of(model)
    model[0](torch.ones(1, 2)).sum().backward()
    coverage.check([], optimizers)  # a step that trains another sub-model says nothing of this one
    assert not caplog.records
    coverage.check(["net"], optimizers)
    coverage.check(["net"], optimizers)
    assert [record.message for record in caplog.records] == [
        "2 of 4 parameters received no gradient: net.1.bias, net.1.weight"
    ]
