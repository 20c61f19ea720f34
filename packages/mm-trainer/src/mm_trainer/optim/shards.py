"""The rows of a parameter that this rank holds: FSDP2 splits along dim 0, and optimizers work on what is local."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_element(tensor: Tensor) -> int:
    """Position of the first local element in the whole tensor, counted row by row."""
    if not isinstance(tensor, DTensor) or not local(tensor).numel():
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return sum(start * stride for start, stride in zip(offset, tensor.stride(), strict=True))


def split_by_rows(tensor: Tensor) -> bool:
    """Whether every rank holds whole rows: a plain tensor, or one that is sharded along dim 0 only."""
    return not isinstance(tensor, DTensor) or all(p.is_replicate() or p == Shard(0) for p in tensor.placements)


def zeros_per_row(parameter: Tensor, columns: int) -> Tensor:
    """(rows, columns) float32 zeros that are split like ``parameter``, (rows, …)."""
    # From local zeros, since `zeros_like` can't give another number of columns.
    zeros = torch.zeros(local(parameter).shape[0], columns, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    sharded = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((parameter.shape[0], columns)),
        stride=(columns, 1),
    )
    return sharded.to(parameter.device)  # of parameters that are offloaded, not the mesh's
