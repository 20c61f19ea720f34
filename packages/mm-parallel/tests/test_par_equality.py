"""Any way of laying a model out over ranks computes what one process computes."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest
import torch
import torch.distributed as dist
from numbers_close import FP32_BLOCK, assert_adamw_near, assert_gradients_near, assert_near
from par_models import Denoiser, Pipeline, batch, whole

from mm_parallel import (
    ActivationOffloadPlan,
    ContextParallel,
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelConfig,
    ParallelMesh,
    RecomputePlan,
    SubPlan,
    apply_features,
    clip_grad_norm,
    parallelize,
    reset_frozen,
)

pytestmark = pytest.mark.numeric

LR = 1e-3
CONTEXTS = {"no context": (1, 1), "u2": (2, 1), "r2": (1, 2), "u2r2": (2, 2), "u4": (4, 1), "r4": (1, 4)}
LAYOUTS = ("fsdp", "hsdp", "sub-plans")
MEMORY = ("none", "recompute", "offload", "both")


def build(causal):
    torch.manual_seed(0)
    return Pipeline(causal=causal)


@cache
def one_process(samples, tokens, causal, steps=2):
    """Plain torch: losses, norms, gradients of the first step, final parameters, and what AdamW was given."""
    model = build(causal)
    optimizer = torch.optim.AdamW(model.predictor.parameters(), lr=LR)
    losses, norms, gradients, clipped = [], [], {}, []
    for step in range(steps):
        loss = model.loss(*batch(*range(step * samples, (step + 1) * samples), tokens=tokens))
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.predictor.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.predictor.parameters(), 1.0))
        clipped.append({n: p.grad.clone() for n, p in model.predictor.named_parameters()})
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {n: p.detach() for n, p in model.predictor.named_parameters()}, clipped


def four_ranks(rank, world, layout, context, memory, causal, tokens, steps=2):
    sizes, plan = sizes_and_plan(layout, context)
    mesh = ParallelMesh.build(sizes)
    model = build(causal)
    model.predictor.set_context_parallel(mesh.context_parallel())
    apply_features(model, features(memory))
    subs = {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}
    parallelize(model, mesh=mesh, plan=plan, sub_models=subs)
    optimizer = torch.optim.AdamW(model.predictor.parameters(), lr=LR, fused=True)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss = model.loss(*batch(step * mesh.data_size + mesh.data_rank, tokens=tokens))
        reset_frozen(model.text_encoder)
        loss.backward()
        gradients = gradients or {n: whole(p.grad).clone() for n, p in model.predictor.named_parameters()}
        norms.append(clip_grad_norm(model.predictor.parameters(), 1.0))
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {n: whole(p.detach()) for n, p in model.predictor.named_parameters()}


def all_of(rank, world, cases):
    return [four_ranks(rank, world, *case) for case in cases]


def sizes_and_plan(layout, context):
    """On 4 ranks; a trained sub-model's shards are a multiple of the context-parallel degree."""
    ulysses, ring = CONTEXTS[context]
    shard = 4 if layout == "fsdp" or (layout == "sub-plans" and ulysses * ring < 4) else 2
    sub_plans = {}
    if layout == "sub-plans":
        own = max(2, ulysses * ring)
        sub_plans = {
            "predictor": SubPlan(shard_size=own, trainable=True),
            "text_encoder": SubPlan(shard_size=6 - shard),
        }
    plan = FSDPPlan(
        apply_modules=("text_encoder", "predictor.blocks.{*}", "predictor.head"),
        ignored_modules=("ae",),
        param_dtype=None,
        sub_plans=sub_plans,
    )
    if layout == "hsdp":  # cuts through context groups of 4: refused by the config, and exact all the same
        return MeshSizes(2, 2, ulysses, ring), plan
    config = ParallelConfig(
        fully_shard_parallel_size=shard, ulysses_parallel_size=ulysses, ring_attention_size=ring, fsdp_plan=plan
    )
    return MeshSizes.resolve(config, 4), plan


def features(memory):
    blocks = ("predictor.blocks.{*}",)
    return FeaturesConfig(
        recompute=memory in ("recompute", "both"),
        recompute_plan=RecomputePlan(apply_modules=blocks),
        enable_activation_offload=memory in ("offload", "both"),
        activation_offload_plan=ActivationOffloadPlan(apply_modules=blocks, min_bytes=0),
    )


def assert_equal(found, expected, case):
    for got, reference in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert_near(got, reference, FP32_BLOCK, case)
    assert_gradients_near(found[2], expected[2], what=case)
    assert_adamw_near(found[3], expected[3], expected[4], LR, case)


def check(run_ranks, cases, timeout):
    ranks = run_ranks(all_of, 4, cases, timeout=timeout)
    for index, (layout, context, memory, causal, tokens) in enumerate(cases):
        expected = one_process(sizes_and_plan(layout, context)[0].data, tokens, causal)
        for found in ranks:
            assert_equal(found[index], expected, (layout, context, memory, causal, tokens))


def pairwise():
    """All contexts with all memory features; layout, mask and length chosen so that every pair of values meets."""
    for (c, context), (m, memory) in product(enumerate(CONTEXTS), enumerate(MEMORY)):
        yield LAYOUTS[(c + m) % 3], context, memory, bool((m + c // 3) % 2), (75, 24)[(m // 2 + c) % 2]


def test_the_subset_holds_every_pair_of_values():
    values = (LAYOUTS, tuple(CONTEXTS), MEMORY, (False, True), (75, 24))
    for i, j in combinations(range(5), 2):
        assert {(case[i], case[j]) for case in pairwise()} == set(product(values[i], values[j]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_equal_one_process(run_ranks, layout):
    """B035, B047, B048, B051, B055, B058: loss, every gradient, the norm, and the parameters after two AdamW steps."""
    check(run_ranks, [case for case in pairwise() if case[0] == layout], timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "context"), list(product(LAYOUTS, CONTEXTS)))
def test_four_ranks_equal_one_process_in_every_combination(run_ranks, layout, context):
    """The whole matrix: memory features, masks, and lengths that divide and that don't."""
    rest = product(MEMORY, (False, True), (75, 24))
    check(run_ranks, [(layout, context, *one) for one in rest], timeout=600)


RING_CASES = [(tokens, causal) for tokens in (75, 5, 2) for causal in (False, True)]


def ring_only(rank, world):
    mesh = ParallelMesh.build(MeshSizes(shard=world, ring=world))
    found = []
    for tokens, causal in RING_CASES:
        model = build(causal)
        model.predictor.set_context_parallel(mesh.context_parallel())
        parallelize(model.predictor, mesh=mesh, plan=FSDPPlan(("blocks.{*}",), param_dtype=None))
        model.loss(*batch(0, tokens=tokens)).backward()
        found.append({n: whole(p.grad) for n, p in model.predictor.named_parameters()})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_other_numbers_of_ranks(run_ranks, world):
    """B047, B051: 2 and 3 ranks, sequences that divide by neither or leave ranks with nothing but padding."""
    for found in run_ranks(ring_only, world):
        for gradients, case in zip(found, RING_CASES, strict=True):
            assert_gradients_near(gradients, one_process(1, *case, 1)[2], what=case)


def saved_bytes(rank, world, sizes):
    """Bytes that the graph of one forward keeps on this rank: each storage once, parameters left out."""
    mesh = ParallelMesh.build(sizes)
    return bytes_kept(mesh.context_parallel())


def bytes_kept(context_parallel):
    torch.manual_seed(0)
    model = Denoiser(dim=64, heads=4, layers=4, hidden=256)
    model.set_context_parallel(context_parallel)
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, t, _, _ = batch(0, tokens=1000)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x, t, torch.zeros(1, 5, 8)).sum()
    return sum(kept.values())


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)])
def test_activations_shrink_with_the_context_parallel_degree(run_ranks, ulysses, ring):
    """At the level of the model, at most 1/degree + 0.10 of one rank's saved bytes."""
    degree = ulysses * ring
    alone = bytes_kept(ContextParallel.single())
    for kept in run_ranks(saved_bytes, degree, MeshSizes(shard=degree, ulysses=ulysses, ring=ring)):
        assert kept / alone <= 1 / degree + 0.10
