"""The gradient norm over any mixture of sharded, replicated and plain parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

_Layout = tuple[DeviceMesh, tuple[object, ...]] | None


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float | None) -> torch.Tensor:
    """Scale gradients so that their joint 2-norm is at most ``max_norm``; every element counts once.

    Call on all ranks after the last backward of a step. Squares are summed over the ranks that hold different shards,
    never over replicas; gradients of plain parameters are expected to be equal on all ranks.

    Args:
        parameters: those without a gradient are skipped; the same ones on all ranks.
        max_norm: None only measures.

    Returns:
        The norm before clipping: a 0-dim plain tensor, equal on all ranks.

    Raises:
        NotImplementedError: a gradient that is neither sharded nor replicated.
    """
    # Local shards, by layout: one all-reduce for each group of gradients instead of one for each gradient.
    groups: dict[_Layout, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_layout(parameter.grad), []).append(_local(parameter.grad))
    if not groups:
        return torch.zeros(())
    squares = [_sum_of_squares(layout, gradients) for layout, gradients in groups.items()]
    norm = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradients in groups.values():
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def _layout(gradient: torch.Tensor) -> _Layout:
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_of_squares(layout: _Layout, gradients: list[torch.Tensor]) -> torch.Tensor:
    # In fp32 at least: a sum of many small squares would stop growing in bf16.
    norms = torch._foreach_norm([g if g.dtype == torch.float64 else g.float() for g in gradients])
    total = torch.stack(list(norms)).square().sum()
    if layout is None:
        return total
    mesh, placements = layout
    total = total.to(mesh.device_type)  # gradients of offloaded parameters are on the CPU
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):  # replicas hold the same elements, which must count once
            dist.all_reduce(total, group=mesh.get_group(axis))
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(f"expected gradients that are sharded or replicated, got {placement}")
    return total
