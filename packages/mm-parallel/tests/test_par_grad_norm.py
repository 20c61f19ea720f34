"""One norm over gradients that lie in many ways."""

from __future__ import annotations

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_OP, assert_near
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, SubPlan, clip_grad_norm, parallelize

pytestmark = pytest.mark.numeric


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def data(rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def mixed_layouts(rank, world):
    model = Three()
    mesh = ParallelMesh.build(MeshSizes(shard=world))
    sub_plans = {"b": SubPlan(shard_size=2, trainable=True), "c": SubPlan(cpu_offload=True)}
    parts = {"a": model.a, "b": model.b, "c": model.c}
    parallelize(model, mesh=mesh, plan=FSDPPlan(param_dtype=None, sub_plans=sub_plans), sub_models=parts)
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.full((2,), 0.5)
    idle = nn.Parameter(torch.ones(2))
    model.a(torch.zeros(1, 5))
    model.c(model.b(model.a(data(rank)))).square().mean().backward()
    parameters = [*model.parameters(), plain, idle]
    only_measured = clip_grad_norm(parameters, None)
    norm = clip_grad_norm(iter(parameters), 0.1)
    return only_measured, norm, clip_grad_norm(parameters, 100.0)


def test_every_element_counts_once_in_any_mixture(run_ranks):
    """B035, B036: full shards, HSDP, offloaded and plain parameters in one norm; equal bits on all ranks."""
    model = Three()
    torch.stack([model(data(rank)).square().mean() for rank in range(4)]).mean().backward()
    squares = sum(p.grad.square().sum() for p in model.parameters()) + 0.5
    ranks = run_ranks(mixed_layouts, 4)
    for measured, norm, clipped in ranks:
        assert_near(norm, squares.sqrt().detach(), FP32_BLOCK)
        assert_near(clipped, torch.tensor(0.1), FP32_BLOCK)
        assert measured.equal(norm)
        assert norm.equal(ranks[0][1])
        assert (type(norm), norm.shape) == (torch.Tensor, ())


def test_on_one_process_it_is_torchs_own():
    ours, theirs = Three(), Three()
    for model in (ours, theirs):
        model(data(0)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    assert_near(clip_grad_norm(ours.parameters(), 0.1), expected, FP32_OP)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_near(a.grad, b.grad, FP32_OP)


def test_no_gradients_and_bad_numbers():
    assert clip_grad_norm(Three().parameters(), 1.0) == 0
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert clip_grad_norm([parameter], 1.0).isnan()
    parameter.grad = torch.tensor([1.0, float("inf")])
    assert clip_grad_norm([parameter], None).isinf()
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    parameter.grad = torch.full((2,), 1e-30, dtype=torch.float64)  # its square underflows in fp32
    assert clip_grad_norm([parameter], None) == pytest.approx(2**0.5 * 1e-30)


def unreduced(rank, world):
    mesh = ParallelMesh.build(MeshSizes(shard=world)).fsdp()
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="expected gradients that are sharded or replicated"):
        clip_grad_norm([parameter], 1.0)


def test_unreduced_gradients_are_refused(run_ranks):
    run_ranks(unreduced, 2)
