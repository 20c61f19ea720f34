"""Bytes on the wire, counted, against formulas written down independently of the counter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from par_models import Pipeline, batch

from mm_parallel import (
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    RecomputePlan,
    apply_features,
    count_communication,
    parallelize,
    reset_frozen,
)

LAYERS, HEADS, HEAD_DIM, CHANNELS = 2, 4, 8, 6


def padded_numel(parameters, shards):
    """What one all-gather moves: every parameter, its first dim padded to a multiple of the shards."""
    return sum(-(-p.shape[0] // shards) * shards * (p.numel() // p.shape[0]) for p in parameters)


def step(rank, world, sizes, recompute, tokens, dtype):
    torch.manual_seed(0)
    model = Pipeline(layers=LAYERS)
    mesh = ParallelMesh.build(sizes)
    model.predictor.set_context_parallel(mesh.context_parallel())
    plan = RecomputePlan(apply_modules=("predictor.blocks.{*}",))
    apply_features(model, FeaturesConfig(recompute=recompute, recompute_plan=plan))
    subs = {"text_encoder": model.text_encoder, "predictor": model.predictor, "ae": model.ae}
    fsdp_plan = FSDPPlan(apply_modules=("predictor.blocks.{*}",), ignored_modules=("ae",), param_dtype=dtype)
    parallelize(model, mesh=mesh, plan=fsdp_plan, sub_models=subs)
    data = batch(mesh.data_rank, tokens=tokens)
    model.loss(*data).backward()
    reset_frozen(model.text_encoder)
    with count_communication(mesh) as forward:
        loss = model.loss(*data)
    reset_frozen(model.text_encoder)
    with count_communication(mesh) as backward:
        loss.backward()
    return forward, backward


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 4), (2, 2)])
def test_fsdp_and_hsdp_bytes(run_ranks, replicate, shard, dtype):
    """Two all-gathers and one reduce-scatter of (n - 1)/n each in their dtypes; one all-reduce across replicas."""
    model = Pipeline(layers=LAYERS)
    frozen, trained = (padded_numel(m.parameters(), shard) for m in (model.text_encoder, model.predictor))
    width = 2 if dtype else 4
    forward, backward = run_ranks(step, 4, MeshSizes(replicate, shard), False, 24, dtype)[1]
    assert forward.total(kind="all_gather").bytes == width * (frozen + trained) * (shard - 1) // shard
    assert backward.total(kind="all_gather").bytes == width * trained * (shard - 1) // shard
    assert backward.total(kind="reduce_scatter").bytes == 4 * trained * (shard - 1) // shard
    across = 2 * (replicate - 1) * (4 * trained // shard) // replicate
    assert backward.total(kind="all_reduce", axis="replicate").bytes == across
    assert set(forward.by) | set(backward.by) <= {
        ("all_gather", "shard"),
        ("reduce_scatter", "shard"),
        ("all_reduce", "replicate"),
    }


@pytest.mark.parametrize(("ulysses", "ring", "recompute"), [(4, 1, False), (1, 4, True), (2, 2, False)])
def test_context_parallel_bytes(run_ranks, ulysses, ring, recompute):
    """Ulysses: 4 exchanges forward and 4 backward; ring: n - 1 hops of K, V and, backward, as many of dK, dV.

    Recompute adds one more forward. Nothing else is sent but the final gather: none from cross-attention, whose keys
    are whole on every rank.
    """
    tokens, sizes = 75, MeshSizes(shard=4, ulysses=ulysses, ring=ring)
    local = -(-tokens // 4)
    per_tensor = 4 * local * HEADS * HEAD_DIM  # bytes of q on one rank, fp32, batch 1
    forward, backward = run_ranks(step, 4, sizes, recompute, tokens, None)[2]
    again = 1 if recompute else 0
    exchanges = 4 * LAYERS * per_tensor * (ulysses - 1) // ulysses
    assert forward.total(kind="all_to_all").bytes == exchanges
    assert backward.total(kind="all_to_all").bytes == exchanges * (1 + again)
    # A ring chunk is `ulysses` parts long and has 1/ulysses of the heads: as many bytes as a local tensor.
    hops = (ring - 1) * LAYERS
    assert forward.total(kind="send").bytes == hops * 2 * per_tensor
    assert backward.total(kind="send").bytes == hops * 2 * per_tensor * (2 + again)
    assert forward.total(kind="all_to_all").calls == (4 * LAYERS if ulysses > 1 else 0)
    assert forward.total(kind="send").calls == hops
    gathered = forward.total(kind="all_gather", axis="context").bytes
    if ulysses > 1 and ring > 1:
        assert ("send", "ring") in forward.by
        assert ("all_to_all", "ulysses") in forward.by
    assert gathered >= 3 * 4 * local * CHANNELS


def plain_collectives(rank, world):
    x, big = torch.ones(4), torch.ones(16)
    with count_communication() as counted:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(4) for _ in range(4)], x)
        dist.all_to_all_single(torch.empty(16), big)
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
        dist.barrier()
    return {kind: (t.calls, t.bytes) for (kind, axis), t in counted.by.items()}, str(counted)


def test_each_kind_is_counted_by_its_formula(run_ranks):
    ranks = run_ranks(plain_collectives, 4)
    expected = {"all_reduce": (1, 24), "broadcast": (1, 12), "all_gather": (1, 48), "all_to_all": (1, 48)}
    assert ranks[1][0] == expected
    assert ranks[0][0] == expected | {"send": (1, 16)}
    assert "all_to_all     other            1 calls               48 bytes" in ranks[0][1]
