"""Masters in fp32, a forward in bf16: with FSDP2 on several ranks, by other means on one."""

from __future__ import annotations

import pytest
import torch
from numbers_close import BF16_BLOCK, BF16_GRADIENT, FP32_OP, assert_near
from par_models import Denoiser, Pipeline, batch, whole
from torch import nn

from mm_parallel import FeaturesConfig, FSDPPlan, MeshSizes, ParallelMesh, RecomputePlan, apply_features, parallelize

pytestmark = pytest.mark.numeric

PATTERNS = ("blocks.{*}", "head")


class Recorder(nn.Module):
    """What dtypes a unit sees: its parameter, a float argument, and a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.seen = []

    def forward(self, x, t):
        self.seen.append((self.linear.weight.dtype, x.dtype, t.dtype, self.table.dtype, t.item()))
        return self.linear(x.to(self.linear.weight.dtype)) + self.table


def dtypes(rank, world, options):
    model = Recorder()
    sizes = MeshSizes(shard=world)
    parallelize(model, mesh=ParallelMesh.build(sizes), plan=FSDPPlan(**options))
    out = model(torch.ones(2, 4), torch.tensor(731.0))
    out.float().sum().backward()
    return model.seen, out.dtype, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_only_parameters_are_cast(run_ranks, world):
    """A timestep of 731 stays 731 (bf16 would make it 732), tables and inputs keep fp32, masters and gradients too."""
    for seen, out, masters, grads in run_ranks(dtypes, world, {}):
        assert seen == [(torch.bfloat16, torch.float32, torch.float32, torch.float32, 731.0)]
        assert (out, masters, grads) == (torch.float32, {torch.float32}, {torch.float32})


@pytest.mark.parametrize("world", [1, 2])
def test_output_dtype_is_that_of_the_root(run_ranks, world):
    (_, out, _, _), *_ = run_ranks(dtypes, world, {"output_dtype": "fp16"})
    assert out == torch.float16


def step_in_bf16(rank, world, recompute, lr):
    torch.manual_seed(0)
    model = Pipeline()
    if recompute:
        plan = RecomputePlan(apply_modules=("predictor.blocks.{*}",))
        apply_features(model, FeaturesConfig(recompute=True, recompute_plan=plan))
    before = {n: p.detach().clone() for n, p in model.predictor.named_parameters()}
    parallelize(model.predictor, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=FSDPPlan(PATTERNS))
    keys = (0, 1) if world == 1 else (rank,)
    loss = model.loss(*batch(*keys))
    loss.backward()
    gradients = {n: whole(p.grad).clone() for n, p in model.predictor.named_parameters()}
    torch.optim.AdamW(model.predictor.parameters(), lr=lr, weight_decay=0.0).step()
    moved = {n: (whole(p.detach()) - before[n]).abs().max() for n, p in model.predictor.named_parameters()}
    return loss.detach(), gradients, moved


def test_one_rank_computes_what_fsdp_does(run_ranks):
    """The bypass and FSDP2 round in the same places; the reduction over 2 ranks leaves bf16 noise."""
    _, alone, _ = step_in_bf16(0, 1, False, 1e-6)
    for _, gradients, _ in run_ranks(step_in_bf16, 2, False, 1e-6):
        for name in alone:
            assert (gradients[name] - alone[name]).norm() <= BF16_BLOCK * alone[name].norm(), name


def test_one_rank_computes_in_bf16_close_to_fp32():
    torch.manual_seed(0)
    plain = Pipeline()
    loss = plain.loss(*batch(0, 1))
    loss.backward()
    found, gradients, _ = step_in_bf16(0, 1, False, 1e-6)
    assert (found - loss).abs() <= 1e-2 * loss
    for name, parameter in plain.predictor.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= BF16_GRADIENT * parameter.grad.norm(), name


def test_recompute_under_the_bypass_changes_no_bit():
    """B028: position tables are fp32 in the forward and in the recomputation."""
    _, expected, _ = step_in_bf16(0, 1, False, 1e-6)
    _, found, _ = step_in_bf16(0, 1, True, 1e-6)
    assert all(found[n].equal(expected[n]) for n in expected)


def test_weights_move_at_a_small_learning_rate(run_ranks):
    """fp32 masters move at lr 1e-6, where bf16 weights of their size would not."""
    for world in (1, 2):
        for _, _, moved in run_ranks(step_in_bf16, world, True, 1e-6):
            assert all(0.5e-6 < m < 1.5e-6 for m in moved.values())


def test_gradients_accumulate_in_the_masters_dtype():
    """Two backwards under the bypass: the sum of both, to fp32 rounding."""
    torch.manual_seed(0)
    model = Denoiser(layers=1)
    parallelize(model, mesh=ParallelMesh.build(MeshSizes()), plan=FSDPPlan(PATTERNS))
    text = torch.randn(1, 3, 8)
    apart = []
    for key in (0, 1):
        x, t, _, _ = batch(key)
        model(x, t, text).square().mean().backward()
        apart.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    for key in (0, 1):
        x, t, _, _ = batch(key)
        model(x, t, text).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert_near(parameter.grad, apart[0][name] + apart[1][name], FP32_OP, name)


class TwoDtypes(nn.Module):
    """A module loaded in bf16 that keeps its norm in fp32, as such checkpoints do; frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8).bfloat16()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y = self.linear(x.to(self.linear.weight.dtype)).float()
        return torch.nn.functional.layer_norm(y, (8,), self.norm.weight.float(), self.norm.bias.float())


def two_dtypes(rank, world, freeze):
    model = TwoDtypes()
    if freeze:
        model.requires_grad_(False)
    else:
        model.float()  # trained: fp32 masters
    parallelize(model, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=FSDPPlan())
    out = model(torch.linspace(-1, 1, 16).view(2, 8))
    if not freeze:
        out.square().sum().backward()
    return out.detach(), {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_modules_with_fp32_norms(run_ranks, world):
    """B046: no dtype error, norms in fp32, outputs within 2e-2 of the fp32 module, trained or frozen."""
    model = TwoDtypes().float()
    expected = model(torch.linspace(-1, 1, 16).view(2, 8)).detach()
    for freeze, dtypes_after in ((True, {torch.bfloat16, torch.float32}), (False, {torch.float32})):
        for out, found in run_ranks(two_dtypes, world, freeze):
            assert (out - expected).abs().max() <= 2e-2
            assert found == dtypes_after
