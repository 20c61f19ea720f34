"""Ulysses' exchange: some tokens with all heads ↔ all tokens with some heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange


def swap_heads_and_tokens(group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange among the n ranks of ``group``: (B, X, n × Y, D) on each → (B, Y, n × X, D), for several tensors.

    With X = local tokens and n × Y = all heads, it yields this rank's heads of all tokens. It is its own inverse, and
    therefore its own adjoint. The exchanges of all tensors are in flight together.
    """
    return _Swap.apply(group, *tensors)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return _swap(group, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, *_swap(ctx.group, grads)


def _swap(group: dist.ProcessGroup, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    n = group.size()
    # Slice i along n goes to rank i, and is already laid out as its receiver wants it.
    sent = [rearrange(x, "b x (n y) d -> n b y x d", n=n).contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    works = [dist.all_to_all_single(r, s, group=group, async_op=True) for r, s in zip(received, sent, strict=True)]
    for work in works:
        work.wait()
    return tuple(rearrange(x, "n b y x d -> b y (n x) d") for x in received)
