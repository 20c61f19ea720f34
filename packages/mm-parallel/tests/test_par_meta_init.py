"""Parameters without memory, buffers with it, and initial values that no number of ranks changes."""

from __future__ import annotations

import pytest
import torch
from numbers_close import FP32_BLOCK, assert_near
from par_models import Pipeline, batch, whole
from torch import nn
from torch.distributed.tensor import DTensor

from mm_parallel import (
    FSDPPlan,
    KeyedInitializer,
    MeshSizes,
    ParallelMesh,
    SubPlan,
    materialize,
    meta_parameters,
    parallelize,
)
from mm_parallel.sharding.keyed_init import BLOCK


class Ties(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        real = nn.Parameter(torch.ones(2), requires_grad=False)
        self.c, self.d = nn.Module(), nn.Module()
        self.c.w = real
        self.d.w = real
        self.d.w.tag = "kept"
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.items = nn.ParameterList([torch.zeros(2)])


def test_meta_parameters_keep_buffers_ties_and_requires_grad():
    register = nn.Module.register_parameter
    with meta_parameters():
        model = Ties()
    assert nn.Module.register_parameter is register
    assert all(p.is_meta for p in model.parameters())
    assert model.a.weight is model.b.weight
    assert model.c.w is model.d.w
    assert not model.c.w.requires_grad
    assert model.table.tolist() == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), meta_parameters():
        _ = 1 / 0
    assert nn.Module.register_parameter is register


def test_materialize_on_one_process():
    with meta_parameters():
        model = Ties()
    model.real = nn.Linear(2, 2)
    values = model.real.weight.detach().clone()
    materialize(model, "cpu")
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.a.weight is model.b.weight
    assert model.c.w is model.d.w
    assert (model.c.w.tag, model.c.w.requires_grad) == ("kept", False)
    assert model.table.tolist() == [0, 1, 2]
    assert model.real.weight.equal(values)


def build_on_meta(rank, world, sub_plans):
    junk = [torch.full((10_000,), float("nan")) for _ in range(50)]  # so that fresh memory isn't zero by luck
    with meta_parameters():
        model = Pipeline()
    del junk
    model.ae = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
    ae = model.ae[0].weight.clone()
    subs = {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}
    plan = FSDPPlan(
        apply_modules=("predictor.blocks.{*}",), ignored_modules=("ae",), param_dtype=None, sub_plans=sub_plans
    )
    mesh = ParallelMesh.build(MeshSizes(shard=world))
    parallelize(model, mesh=mesh, plan=plan, sub_models=subs)
    materialize(model, mesh.device)
    assert model.ae[0].weight.equal(ae)
    assert not any(t.is_meta for t in model.parameters())
    assert isinstance(model.predictor.embed.weight, DTensor) == (world > 1)
    assert model.text_encoder.out.weight is model.text_encoder.shared.weight
    init = KeyedInitializer(seed=3)
    for name, parameter in model.named_parameters():
        if name.startswith("ae"):
            continue
        init.normal_(parameter, name, std=0.2, mean=0.1)
    init.uniform_(model.predictor.head.linear.weight, "head", bound=0.5)
    init.zeros_(model.predictor.embed.bias)
    init.ones_(model.predictor.head.scale)
    values = {n: whole(p.detach()) for n, p in model.named_parameters() if not n.startswith("ae")}
    return values, model.predictor.frequencies, model.text_encoder(batch(0)[2]).detach()


@pytest.mark.numeric
@pytest.mark.parametrize("world", [2, 3])
def test_keyed_initialisation_and_buffers_are_the_same_on_any_number_of_ranks(run_ranks, world):
    """B027: position tables equal a plain build on every rank; B029: both names of the tied table are one tensor."""
    expected, _, hidden = build_on_meta(0, 1, {})
    table = Pipeline().predictor.frequencies
    offloaded = {"predictor": SubPlan(cpu_offload=True)}
    for values, frequencies, output in run_ranks(build_on_meta, world, offloaded):
        assert frequencies.equal(table)
        assert values.keys() == expected.keys()
        assert all(values[n].equal(expected[n]) for n in expected)
        assert_near(output, hidden, FP32_BLOCK)


def load_one_key(rank, world):
    """B029: a file that holds the table only; both names are loaded, and hidden states equal the original's."""
    torch.manual_seed(0)
    original = Pipeline().text_encoder
    state = {n: p for n, p in original.state_dict().items() if n != "out.weight"}
    with meta_parameters():
        encoder = Pipeline().text_encoder
    parallelize(encoder, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=FSDPPlan(param_dtype=None))
    materialize(encoder, "cpu")
    for name, parameter in encoder.named_parameters():
        shards = torch.chunk(state[name], world)
        with torch.no_grad():
            parameter.to_local().copy_(shards[rank] if rank < len(shards) else parameter.to_local())
    ids = batch(0)[2]
    return encoder(ids).equal(original(ids)), [n for n, _ in encoder.named_parameters() if n not in state]


def test_a_tie_survives_meta_wrap_and_a_file_with_one_name(run_ranks):
    """B029"""
    for same, not_in_file in run_ranks(load_one_key, 2):
        assert same
        assert not_in_file == []


def test_keyed_draws_go_block_by_block():
    """A tensor of several blocks equals its blocks drawn one by one; keys and seeds matter."""
    whole_tensor = torch.empty(3, BLOCK // 2 + 5)
    KeyedInitializer(0).normal_(whole_tensor, "w", std=1.0)
    other = torch.empty_like(whole_tensor)
    KeyedInitializer(0).normal_(other, "w", std=1.0)
    assert other.equal(whole_tensor)
    KeyedInitializer(1).normal_(other, "w", std=1.0)
    assert not other.equal(whole_tensor)
    KeyedInitializer(0).normal_(other, "v", std=1.0)
    assert not other.equal(whole_tensor)
    assert abs(whole_tensor.std() - 1) < 0.01
    half = torch.empty(4, dtype=torch.bfloat16)
    KeyedInitializer(0).normal_(half, "w", std=1.0)
    single = torch.empty(4)
    KeyedInitializer(0).normal_(single, "w", std=1.0)
    assert half.equal(single.bfloat16())
    with pytest.raises(ValueError, match="expected a contiguous parameter"):
        KeyedInitializer(0).zeros_(torch.empty(4, 4).t()[:2])
