"""Errors of a configuration carry the place of the field as a path, whatever their words are."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

from mm_parallel import (
    FeaturesConfig,
    FieldError,
    FSDPPlan,
    MeshSizes,
    ParallelConfig,
    PatternError,
    PlanError,
    RecomputePlan,
    SubPlan,
    check_features,
    check_heads,
    match_modules,
    resolve_plan,
)


def model() -> nn.Module:
    built = nn.Module()
    built.encoder, built.blocks = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    built.encoder.requires_grad_(False)
    return built


CASES = {
    "dtype": (lambda: FSDPPlan(param_dtype="bf8"), ("param_dtype",)),
    "entry of a list": (lambda: FSDPPlan(apply_modules=("a", "")), ("apply_modules", 1)),
    "entry given twice": (lambda: FSDPPlan(ignored_modules=("b", "a", "a")), ("ignored_modules", 1)),
    "sub-plan of its own": (lambda: SubPlan(shard_size=0), ("shard_size",)),
    "switch without a plan": (lambda: FeaturesConfig(recompute=True), ("recompute",)),
    "sizes": (
        lambda: MeshSizes.resolve(ParallelConfig(ulysses_parallel_size=3), 4),
        ("ulysses_parallel_size",),
    ),
    "size of a sub-plan": (
        lambda: MeshSizes.resolve(ParallelConfig(fsdp_plan=FSDPPlan(sub_plans={"encoder": SubPlan(shard_size=3)})), 4),
        ("fsdp_plan", "sub_plans", "encoder", "shard_size"),
    ),
    "heads": (lambda: check_heads(6, 4), ("ulysses_parallel_size",)),
    "dead pattern": (
        lambda: resolve_plan(model(), FSDPPlan(apply_modules=("encoder", "blocs.{*}"))),
        ("apply_modules", 1),
    ),
    "braces": (lambda: resolve_plan(model(), FSDPPlan(ignored_modules=("blocks.{a}",))), ("ignored_modules", 0)),
    "feature": (
        lambda: check_features(model(), FeaturesConfig(True, RecomputePlan(("encoder", "blocks")))),
        ("recompute_plan", "apply_modules", 1),
    ),
    "sub-plan against the model": (
        lambda: resolve_plan(
            m := model(),
            FSDPPlan(sub_plans={"encoder": SubPlan(trainable=True)}),
            {"encoder": m.encoder, "blocks": m.blocks},
        ),
        ("sub_plans", "encoder", "trainable"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_path_leads_to_the_field(case: str) -> None:
    act, path = CASES[case]
    with pytest.raises(FieldError, match=".") as caught:
        act()
    assert caught.value.path == path


def test_every_dead_pattern_has_its_own_place() -> None:
    with pytest.raises(PatternError, match="'x' matches no module") as caught:
        match_modules(model(), ["x", "encoder", "y"], what="here")
    assert [fault.path for fault in (caught.value, *caught.value.also)] == [(0,), (2,)]
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "here: 'x' matches no module",
        "here: 'y' matches no module",
    ]


def test_every_contradiction_of_the_sub_plans_is_found() -> None:
    plan = FSDPPlan(sub_plans={"encodr": SubPlan(), "predictor": SubPlan(enabled=False), "ae": SubPlan(shard_size=2)})
    with pytest.raises(PlanError, match="did you mean 'encoder'") as caught:
        plan.check_sub_plans({"encoder": False, "predictor": True, "ae": False})
    assert [fault.path[1:] for fault in (caught.value, *caught.value.also)] == [("encodr",), ("predictor", "enabled")]


def test_an_error_crosses_processes_whole() -> None:
    error = PlanError("there", "is wrong", path=("a", 1), also=[PatternError("", "too", path=(2,))])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.path) == (PlanError, "there: is wrong\ntoo", ("a", 1))
    assert [(type(other), other.path) for other in again.also] == [(PatternError, (2,))]
