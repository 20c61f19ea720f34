"""Patterns and plans on one process, without a process group: what is matched, owned, and refused."""

from __future__ import annotations

import pytest
import torch
from par_models import Pipeline
from torch import nn

from mm_parallel import (
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    PatternError,
    PlanError,
    SubPlan,
    match_modules,
    meta_parameters,
    parallelize,
    resolve_plan,
)


@pytest.fixture()
def model():
    with meta_parameters():
        return Pipeline(layers=12)


def subs(model):
    return {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}


def units(model, sub_models=None, **plan):
    resolved = resolve_plan(model, FSDPPlan(**plan), sub_models)
    return {s.name: {u.name: set(u.parameters) for u in s.units} for s in resolved.sub_models}, resolved


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("predictor.blocks.{*}", [f"predictor.blocks.{i}" for i in range(12)]),
        ("predictor.blocks.*", [f"predictor.blocks.{i}" for i in range(12)]),
        ("predictor.blocks.{0-2}", [f"predictor.blocks.{i}" for i in range(3)]),
        ("predictor.blocks.{9-99}", [f"predictor.blocks.{i}" for i in range(9, 12)]),
        ("predictor.blocks.1", ["predictor.blocks.1"]),
        ("*.head", ["predictor.head"]),
        ("predictor.te*", ["predictor.text"]),
        (
            "predictor.blocks.{10-11}.*_attn",
            [f"predictor.blocks.{i}.{k}_attn" for i in (10, 11) for k in ("self", "cross")],
        ),
    ],
)
def test_pattern_vocabulary(model, pattern, expected):
    assert match_modules(model, (pattern,), what="x") == {pattern: expected}


def test_dead_patterns_are_all_reported_with_near_names(model):
    """B040: one typo and one good pattern; the message names every dead one and what was probably meant."""
    with pytest.raises(PatternError) as error:
        match_modules(model, ("predictor.block.{*}", "predictor.head", "text_encodr"), what="fsdp_plan.apply_modules")
    assert "fsdp_plan.apply_modules: 'predictor.block.{*}' matches no module; did you mean predictor.blocks.{*}" in str(
        error.value
    )
    assert "'text_encodr' matches no module; did you mean text_encoder" in str(error.value)
    assert "'predictor.head'" not in str(error.value)


@pytest.mark.parametrize("section", ["apply_modules", "ignored_modules"])
def test_dead_patterns_of_a_plan_name_their_field(model, section):
    """B040: the same for ignored modules."""
    with pytest.raises(PatternError, match=rf"fsdp_plan.{section}: 'predictor.blocks.{{13-20}}' matches no module"):
        resolve_plan(model, FSDPPlan(**{section: ("predictor.blocks.{13-20}",)}))


@pytest.mark.parametrize("pattern", ["blocks.{x}", "blocks.{3-1}", "blocks.{", "blocks.{1-}"])
def test_malformed_braces(model, pattern):
    with pytest.raises(PatternError, match=r"braces hold \{\*\} for any one name or a range"):
        match_modules(model, (pattern,), what="x")


def test_a_list_of_modules_has_no_forward(model):
    with pytest.raises(PatternError, match=r"name its items: predictor.blocks.\{\*\}"):
        resolve_plan(model, FSDPPlan(apply_modules=("predictor.blocks",)), subs(model))


def test_every_parameter_belongs_to_one_unit_and_the_rest_to_the_root(model):
    found, _ = units(
        model, subs(model), apply_modules=("text_encoder", "predictor.blocks.{*}"), ignored_modules=("ae",)
    )
    assert list(found) == ["text_encoder", "predictor"]
    assert list(found["predictor"])[:3] == ["predictor", "predictor.blocks.0", "predictor.blocks.1"]
    assert all(name.startswith("predictor.blocks.3.") for name in found["predictor"]["predictor.blocks.3"])
    everything = [name for names in found["predictor"].values() for name in names]
    assert sorted(everything) == sorted(f"predictor.{n}" for n, _ in model.predictor.named_parameters())


def test_overlapping_patterns_wrap_once(model):
    """B039: `predictor.blocks.{*}` and `predictor.blocks.0` name one module twice; it becomes one unit."""
    found, resolved = units(
        model, subs(model), apply_modules=("predictor.blocks.{*}", "predictor.blocks.0"), ignored_modules=("ae",)
    )
    assert len(found["predictor"]) == 13
    assert [len(names) for names in resolved.matches.values()] == [12, 1]


def test_without_sub_models_the_model_is_the_root(model):
    found, _ = units(model.predictor, apply_modules=("blocks.{*}",))
    assert list(found) == [""]
    assert "embed.weight" in found[""][""]


def test_ties_across_units_go_to_the_unit_around_both(model):
    """B030: table and tied projection are named as units of their own; the tie belongs to their common root."""
    found, _ = units(
        model,
        subs(model),
        apply_modules=("text_encoder.shared", "text_encoder.out", "text_encoder"),
        ignored_modules=("ae",),
    )
    assert list(found["text_encoder"]) == ["text_encoder"]
    assert "text_encoder.shared.weight" in found["text_encoder"]["text_encoder"]


class Shared(nn.Module):
    """Two blocks that share a projection; each also has something of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.blocks[2][0].weight = self.blocks[1][0].weight


def test_a_tie_inside_two_units_dissolves_one_of_them():
    found, resolved = units(Shared(), apply_modules=("blocks.{*}",))
    assert list(found[""]) == ["", "blocks.0", "blocks.2"]
    assert "blocks.1.0.weight" in found[""][""]
    assert found[""]["blocks.2"] == {"blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias"}
    assert "'blocks.1' merged into the model: 'blocks.1.0.weight' is tied" in resolved.notes[0]


def test_a_module_registered_under_two_names_is_one_unit():
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
    model.again = model.a
    found, _ = units(model, apply_modules=("again", "a", "b"))
    assert list(found[""]) == ["", "a", "b"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"apply_modules": ("ae.0",), "ignored_modules": ("ae",)}, "'ae.0' names 'ae.0', which .*'ae' keeps plain"),
        ({"ignored_modules": ("predictor.head",)}, "predictor.head.scale is trainable, but belongs to no unit"),
        ({"sub_plans": {"predictr": SubPlan()}}, r"sub_plans.predictr: there is no such .*did you mean 'predictor'"),
        ({"sub_plans": {"predictor": SubPlan(shard_size=2)}}, "sub_plans.predictor: .* say so with trainable: true"),
        ({"sub_plans": {"predictor": SubPlan(enabled=False)}}, "its gradients must be reduced"),
        (
            {"sub_plans": {"text_encoder": SubPlan(trainable=True)}},
            "trainable: true, but every parameter of it is frozen",
        ),
        (
            {"sub_plans": {"ae": SubPlan()}, "ignored_modules": ("ae",)},
            "sub_plans.ae: fsdp_plan.ignored_modules names ae as well",
        ),
    ],
)
def test_contradictions_are_refused(model, plan, message):
    with pytest.raises(PlanError, match=message):
        resolve_plan(model, FSDPPlan(**plan), subs(model))


def test_a_trainable_parameter_outside_every_sub_model_is_refused(model):
    with pytest.raises(PlanError, match="predictor.embed.weight is trainable, but belongs to no unit"):
        resolve_plan(model, FSDPPlan(), {"ae": model.ae, "text_encoder": model.text_encoder})
    with pytest.raises(PlanError, match=r"names 'predictor.head', which is in no sub-model"):
        resolve_plan(model, FSDPPlan(apply_modules=("predictor.head",)), {"ae": model.ae})


def test_roots_that_share_or_nest_are_refused(model):
    model.predictor.tied = model.text_encoder.shared
    with pytest.raises(PlanError, match="tied to text_encoder.shared.weight, in another sub-model"):
        resolve_plan(model, FSDPPlan(), subs(model))
    with pytest.raises(PlanError, match="'blocks' is inside sub-model"):
        resolve_plan(model.predictor, FSDPPlan(), {"": model.predictor, "blocks": model.predictor.blocks})


def test_parameters_that_fsdp_can_not_take():
    model = nn.Linear(2, 2)
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(PlanError, match=r"temperature: .*give it the shape \(1,\)"):
        resolve_plan(model, FSDPPlan())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(PlanError, match=r"different dtypes \(0.weight torch.float32, 1.weight torch.bfloat16\)"):
        resolve_plan(mixed, FSDPPlan())
    mixed[1].requires_grad_(False)  # frozen ones may differ
    resolve_plan(mixed, FSDPPlan())


def test_the_report_reads_as_a_table(model):
    """B040: a summary line says how many modules each pattern hit, and what stays plain."""
    report = parallelize(
        model,
        mesh=ParallelMesh.build(MeshSizes()),
        plan=FSDPPlan(apply_modules=("text_encoder", "predictor.blocks.{*}"), ignored_modules=("ae",)),
        sub_models=subs(model),
    )
    text = str(report)
    assert "pattern  predictor.blocks.{*}                        12 modules" in text
    assert "12 × predictor.blocks.{*}                             11,924 parameters, trained" in text
    assert "1 × text_encoder                                        376 parameters, frozen" in text
    assert "ae: 42 parameters, plain on every rank" in text
