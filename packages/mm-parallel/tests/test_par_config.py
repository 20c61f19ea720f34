"""The config sections and the mesh arithmetic: everything that answers before torch is imported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

import mm_parallel
from mm_parallel import (
    ActivationOffloadPlan,
    CompilePlan,
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelConfig,
    RecomputePlan,
    SubPlan,
    check_heads,
)


def test_importing_the_package_and_its_config_imports_no_torch():
    code = "import sys, mm_parallel.config, mm_parallel.sizes, mm_parallel; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_every_public_name_exists():
    assert mm_parallel.__all__ == sorted(mm_parallel.__all__)
    for name in mm_parallel.__all__:
        assert callable(getattr(mm_parallel, name))
    with pytest.raises(AttributeError, match="has no attribute 'parallelise'"):
        _ = mm_parallel.parallelise


@pytest.mark.parametrize(
    "config", [ParallelConfig, FSDPPlan, SubPlan, FeaturesConfig, RecomputePlan, ActivationOffloadPlan, CompilePlan]
)
def test_config_classes_are_frozen_and_closed(config):
    assert config.__pydantic_config__ == {"extra": "forbid"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, None)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ParallelConfig(tensor_parallel_size=2), "tensor_parallel_size: only 1 is supported, got 2"),
        (
            lambda: ParallelConfig(ulysses_parallel_size=0),
            "ulysses_parallel_size: expected a whole number of at least 1",
        ),
        (lambda: ParallelConfig(ring_attention_size=True), "ring_attention_size: expected a whole number"),
        (lambda: ParallelConfig(fully_shard_parallel_size=-1), "at least 1 or auto, got -1"),
        (lambda: ParallelConfig(timeout_s=0), "timeout_s: expected a number of seconds above 0, got 0"),
        (lambda: ParallelConfig(ep_plan={}), "ep_plan: there are no expert-parallel layers yet"),
        (lambda: ParallelConfig(attention_kernel="flsh"), "attention_kernel.*got 'flsh'; did you mean 'flash'"),
        (lambda: FSDPPlan(param_dtype="bf17"), "param_dtype: expected one of bf16, fp16, fp32, null, got 'bf17'"),
        (lambda: FSDPPlan(reshard_after_forward=1), "reshard_after_forward: expected true, false or the number"),
        (lambda: FSDPPlan(reshard_after_forward=None), "reshard_after_forward.*got null"),
        (lambda: FSDPPlan(num_to_forward_prefetch=-1), "num_to_forward_prefetch.*at least 0, got -1"),
        (lambda: FSDPPlan(apply_modules="blocks"), "apply_modules: expected a list of patterns, got the text"),
        (lambda: FSDPPlan(apply_modules=("a", "a")), "apply_modules: a is listed twice"),
        (lambda: FSDPPlan(ignored_modules=("",)), "ignored_modules: expected module names or patterns, got ''"),
        (lambda: SubPlan(enabled=False, trainable=True), "enabled: false leaves the sub-model unsharded"),
        (lambda: SubPlan(shard_size=0), "shard_size: expected a whole number of at least 1, got 0"),
        (lambda: RecomputePlan(policy="every"), "policy: expected one of full, every_n, ops"),
        (lambda: RecomputePlan(keep_ops=("aten.mm",)), "keep_ops: only read under policy: ops"),
        (lambda: ActivationOffloadPlan(window=0), "window: expected a whole number of at least 1"),
        (lambda: FeaturesConfig(recompute=True), "features.recompute: true, but.*apply_modules is empty"),
        (lambda: FeaturesConfig(enable_activation_offload=True), "activation_offload_plan.apply_modules is empty"),
    ],
)
def test_bad_values_name_the_field(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("config", "world", "sizes", "data"),
    [
        ({}, 1, (1, 1, 1, 1), 1),
        ({}, 6, (1, 6, 1, 1), 6),
        ({"fully_shard_parallel_size": 4}, 8, (2, 4, 1, 1), 8),
        ({"fully_shard_parallel_size": 1}, 2, (2, 1, 1, 1), 2),
        ({"ulysses_parallel_size": 2, "ring_attention_size": 2}, 8, (1, 8, 2, 2), 2),
        ({"ulysses_parallel_size": 2, "fully_shard_parallel_size": 4, "data_parallel_size": 4}, 8, (2, 4, 2, 1), 4),
    ],
)
def test_sizes_resolve(config, world, sizes, data):
    resolved = MeshSizes.resolve(ParallelConfig(**config), world)
    assert resolved == MeshSizes(*sizes)
    assert (resolved.world, resolved.data) == (world, data)


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({"ulysses_parallel_size": 4}, 6, r"4 × 1 = 4 doesn't divide the 6 ranks"),
        ({"fully_shard_parallel_size": 3}, 8, r"3 doesn't divide the 8 ranks \(allowed: 1, 2, 4, 8\)"),
        ({"data_parallel_size": 3}, 8, r"data_parallel_size: 3 was given, but 8 ranks .* = 8"),
        (
            {"fully_shard_parallel_size": 2, "ring_attention_size": 4},
            8,
            r"fully_shard_parallel_size: 2 ranks .* multiple of ulysses × ring = 1 × 4 = 4",
        ),
        (
            {"fsdp_plan": FSDPPlan(sub_plans={"p": SubPlan(shard_size=3)})},
            8,
            r"sub_plans.p.shard_size: 3 doesn't divide",
        ),
        (
            {"fsdp_plan": FSDPPlan(sub_plans={"p": SubPlan(shard_size=2, trainable=True)}), "ring_attention_size": 4},
            8,
            r"sub_plans.p.shard_size: 2 ranks .* multiple of",
        ),
        (
            {"fsdp_plan": FSDPPlan(reshard_after_forward=3)},
            8,
            r"3 must divide the 8 ranks .*\(allowed: true, false, or 2, 4\)",
        ),
        ({"fsdp_plan": FSDPPlan(reshard_after_forward=8)}, 8, "and be below 8"),
        (
            {"fsdp_plan": FSDPPlan(reshard_after_forward=4, sub_plans={"p": SubPlan(shard_size=2)})},
            8,
            r"sub_plans.p.reshard_after_forward: 4 must divide the 2 ranks .*or none",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(config, world, message):
    with pytest.raises(ValueError, match=message):
        MeshSizes.resolve(ParallelConfig(**config), world)


def test_only_sub_models_that_are_split_need_a_shard_size_that_context_groups_divide():
    """A frozen text encoder may have shard size 2 where the trained predictor says its own, of 8, under ring 4."""
    plans = {"text_encoder": SubPlan(shard_size=2), "predictor": SubPlan(shard_size=8, trainable=True)}
    config = ParallelConfig(fully_shard_parallel_size=2, ring_attention_size=4, fsdp_plan=FSDPPlan(sub_plans=plans))
    assert MeshSizes.resolve(config, 8) == MeshSizes(4, 2, 1, 4)


def test_heads_that_the_ulysses_degree_does_not_divide():
    """B049: 6 heads on ulysses 4 are refused with the allowed degrees; ulysses 2 is fine."""
    check_heads(6, 2)
    with pytest.raises(ValueError, match=r"4 doesn't divide the 6 attention heads \(allowed: 1, 2, 3, 6\)"):
        check_heads(6, 4)


def test_a_sub_plan_overrides_only_what_it_names():
    plan = FSDPPlan(reshard_after_forward=False, cpu_offload=True, sub_plans={"a": SubPlan(reshard_after_forward=True)})
    assert (plan.reshard_for("a"), plan.offload_for("a")) == (True, True)
    assert (plan.reshard_for("b"), plan.offload_for("b")) == (False, True)
