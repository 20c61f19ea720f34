"""Any way of laying a model out over ranks computes what one process computes."""

from __future__ import annotations

import pytest
import torch
from par_models import Pipeline, batch, relative_error, whole

from mm_parallel import (
    ActivationOffloadPlan,
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    RecomputePlan,
    SubPlan,
    apply_features,
    clip_grad_norm,
    parallelize,
    reset_frozen,
)

PATTERNS = ("text_encoder", "predictor.blocks.{*}", "predictor.head")
LR = 1e-3


def build(**options):
    torch.manual_seed(0)
    return Pipeline(**options)


def reference_run(samples, tokens, causal, steps=2):
    """One process, plain torch: losses, gradients of the first step, norms, final parameters."""
    model = build(causal=causal)
    optimizer = torch.optim.AdamW(model.predictor.parameters(), lr=LR)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss = model.loss(*batch(*range(step * samples, (step + 1) * samples), tokens=tokens))
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.predictor.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.predictor.parameters(), 1.0))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, dict(model.predictor.named_parameters())


def parallel_run(rank, world, sizes, plan, features, tokens, causal, steps=2):
    torch.manual_seed(0)
    model = build(causal=causal)
    mesh = ParallelMesh.build(sizes)
    model.predictor.set_context_parallel(mesh.context_parallel())
    apply_features(model, features)
    subs = {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}
    parallelize(model, mesh=mesh, plan=plan, sub_models=subs)
    optimizer = torch.optim.AdamW(model.predictor.parameters(), lr=LR)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss = model.loss(*batch(step * mesh.data_size + mesh.data_rank, tokens=tokens))
        reset_frozen(model.text_encoder)
        loss.backward()
        gradients = gradients or {n: whole(p.grad).clone() for n, p in model.predictor.named_parameters()}
        norms.append(clip_grad_norm(model.predictor.parameters(), 1.0))
        mean = loss.detach() / world
        torch.distributed.all_reduce(mean)
        losses.append(mean)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: whole(p.detach()) for n, p in model.predictor.named_parameters()}
    return losses, norms, gradients, parameters


def assert_equal(run, reference):
    for (losses, norms, gradients, parameters), _ in zip(run, range(len(run)), strict=True):
        for got, expected in zip(losses + norms, reference[0] + reference[1], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
        for name, expected in reference[2].items():
            assert relative_error(gradients[name], expected) <= 1e-5, name
        for name, expected in reference[3].items():
            assert (parameters[name] - expected).abs().max() <= 0.02 * LR, name


def plan(kind, world):
    sub_plans = {}
    if kind == "sub-plans":
        sub_plans = {"text_encoder": SubPlan(shard_size=2), "predictor": SubPlan(shard_size=world, trainable=True)}
    return FSDPPlan(apply_modules=PATTERNS, ignored_modules=("ae",), param_dtype=None, sub_plans=sub_plans)


def features(kind):
    patterns = ("predictor.blocks.{*}",)
    return FeaturesConfig(
        recompute=kind in ("recompute", "both"),
        recompute_plan=RecomputePlan(apply_modules=patterns),
        enable_activation_offload=kind in ("offload", "both"),
        activation_offload_plan=ActivationOffloadPlan(apply_modules=patterns, min_bytes=0),
    )


CONTEXT = {"none": (1, 1), "u2": (2, 1), "r2": (1, 2), "u2r2": (2, 2), "u4": (4, 1), "r4": (1, 4)}


@pytest.mark.parametrize(
    ("layout", "context", "memory", "causal", "tokens"),
    [
        ("fsdp", "none", "none", False, 24),
        ("hsdp", "u2", "recompute", True, 75),
        ("sub-plans", "r2", "both", False, 75),
        ("fsdp", "u2r2", "both", True, 75),
        ("fsdp", "u4", "offload", False, 75),
        ("sub-plans", "r4", "none", True, 24),
    ],
)
def test_four_ranks_equal_one_process(run_ranks, layout, context, memory, causal, tokens):
    ulysses, ring = CONTEXT[context]
    shard = 2 if layout == "hsdp" else 4
    sizes = MeshSizes(replicate=4 // shard, shard=shard, ulysses=ulysses, ring=ring)
    run = run_ranks(parallel_run, 4, sizes, plan(layout, 4), features(memory), tokens, causal)
    assert_equal(run, reference_run(sizes.data, tokens, causal))
