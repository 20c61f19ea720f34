"""Memory that nobody filled is found, whatever its dtype and however it is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, find_unwritten, materialize, meta_parameters, parallelize

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


class Holder(nn.Module):
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("value", torch.empty(shape, dtype=dtype, device="meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    holder = Holder(dtype, shape)
    materialize(holder, "cpu")
    assert find_unwritten(holder) == ["value"]
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert holder.value.isnan().all()
    holder.value.zero_()
    assert find_unwritten(holder) == []


def test_a_part_is_enough_and_a_nan_of_arithmetic_is_none() -> None:
    holder = Holder(torch.float32, (4,))
    materialize(holder, "cpu")
    holder.value[:3] = 0
    assert find_unwritten(holder) == ["value"]
    holder.value[:] = torch.tensor([torch.inf, torch.nan, 0.0, 1.0]) - torch.tensor([torch.inf, 0.0, torch.nan, 1.0])
    assert holder.value.isnan().any()
    assert find_unwritten(holder) == []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(1, 1), nn.Linear(4, 4)
        self.register_buffer("real", torch.ones(2))
        self.tied = self.other


def fill_but_one(rank: int, world: int, forgotten: str) -> list[str]:
    with meta_parameters():
        model = Model()
    mesh = ParallelMesh.build(MeshSizes(shard=world), device_type="cpu")
    parallelize(model, mesh=mesh, plan=FSDPPlan(param_dtype="fp32"))
    materialize(model, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != forgotten:
                parameter.fill_(0)
    return find_unwritten(model)


@pytest.mark.parametrize("forgotten", ["layer.weight", "other.weight"])
def test_all_ranks_say_the_same_where_a_shard_is_empty(run_ranks, forgotten: str) -> None:
    """A weight of one element lies on rank 0 alone."""
    assert run_ranks(fill_but_one, 2, forgotten) == [[forgotten]] * 2
    assert run_ranks(fill_but_one, 2, "none") == [[]] * 2
