"""Muon for sharded matrices: the update is the momentum, made orthogonal.

[Note: whole matrices in Muon]
Orthogonalising needs the whole matrix; over shards the sums would also run in another order. So the n ranks that share
matrices take n of them at a time: each rank collects the shards of one, orthogonalises it as a single device would, and
sends the shards of the result back. The update is the same to the bit on any number of ranks, no rank holds more than
one whole matrix (in bf16), and the work is divided among them. Replicas do the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mm_trainer.optim.shards import local, split_by_rows

# The polynomial a·x + b·x³ + c·x⁵, five times: https://kellerjordan.github.io/posts/muon/
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(Optimizer):
    """`torch.optim.Muon` (Nesterov momentum) on plain or sharded matrices, with equal results.

    An update has the size that AdamW's typically has (``match_rms_adamw`` in torch; arXiv:2502.16982), so learning rate
    and weight decay are AdamW's.

    Args:
        groups: parameter groups with ``params`` (2-D), ``weight_decay``.
        momentum: share of the old momentum that is kept in a step.
    """

    found_inf: Tensor | None = None
    """0-dim; 1 leaves weights and momentum alone, and the host doesn't wait for it."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim != 2 or not split_by_rows(parameter):
                raise ValueError(f"Muon updates matrices that are whole or split by rows, not {tuple(parameter.shape)}")

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter that hasn't been updated yet."""
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; called on all ranks. ``closure`` isn't supported."""
        assert closure is None
        by_ranks: dict[dist.ProcessGroup | None, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_ranks.setdefault(_sharing_ranks(parameter), []).append((parameter, group))
        for ranks, work in by_ranks.items():
            work.sort(key=lambda item: -item[0].numel())  # equal sizes together: no rank waits for a larger matrix
            size = 1 if ranks is None else ranks.size()
            for start in range(0, len(work), size):
                self._update(work[start : start + size], ranks)

    def _update(self, work: Sequence[tuple[Tensor, dict[str, Any]]], ranks: dist.ProcessGroup | None) -> None:
        """At most one parameter per rank of ``ranks``."""
        momenta = [self._advance_momentum(parameter, group["momentum"]) for parameter, group in work]
        if ranks is None:
            updates = [orthogonalize(momentum) for momentum in momenta]
        else:
            updates = _orthogonalize_shards(momenta, [parameter.shape for parameter, _ in work], ranks)
        for (parameter, group), update in zip(work, updates, strict=True):
            weight, lr = local(parameter), group["lr"]
            size = 0.2 * math.sqrt(max(parameter.shape))
            new = weight.mul(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * size)
            weight.copy_(new if self.found_inf is None else torch.where(self._bad(weight), weight, new))

    def _advance_momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Take the gradient in; returns the local shard of what is to be made orthogonal, in bf16."""
        assert parameter.grad is not None  # `step` has looked
        if not self.state[parameter]:
            self.state[parameter] = self.new_state(parameter)
        buffer, gradient = local(self.state[parameter]["momentum_buffer"]), local(parameter.grad)
        if self.found_inf is not None:
            gradient = torch.where(self._bad(gradient), buffer, gradient)  # a step towards itself
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()

    def _bad(self, tensor: Tensor) -> Tensor:
        assert self.found_inf is not None
        return self.found_inf.to(tensor.device).bool()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Push all singular values towards 1 (Newton–Schulz, five steps: they end between about 0.7 and 1.2).

    Args:
        matrix: (m, n) bf16.

    Returns:
        (m, n) bf16.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    # The Gram matrix of the short side is the smaller one.
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _sharing_ranks(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that each hold some rows of ``parameter``; None if this one holds all."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                return parameter.device_mesh.get_group(dim)
    return None


def _orthogonalize_shards(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Orthogonalise at most n matrices that n ranks share; see [Note: whole matrices in Muon].

    Args:
        shards: this rank's rows of each matrix, bf16.
        shapes: of the whole matrices; the same on all ranks.

    Returns:
        this rank's rows of each result.
    """
    n, rank = ranks.size(), ranks.rank()
    counts = [_elements_per_rank(shape, n) for shape in shapes]
    # Owner i orthogonalises matrix i; ranks beyond the last matrix send their shards and receive nothing.
    sent = [counts[owner][rank] if owner < len(shapes) else 0 for owner in range(n)]
    received = counts[rank] if rank < len(shapes) else [0] * n
    shards_sent = torch.cat([shard.flatten() for shard in shards])
    matrix = shards_sent.new_empty(sum(received))
    dist.all_to_all_single(matrix, shards_sent, received, sent, group=ranks)
    if rank < len(shapes):
        matrix = orthogonalize(matrix.view(shapes[rank])).flatten()
    result = torch.empty_like(shards_sent)
    dist.all_to_all_single(result, matrix, sent, received, group=ranks)
    return [part.view_as(shard) for part, shard in zip(result.split(sent[: len(shapes)]), shards, strict=True)]


def _elements_per_rank(shape: torch.Size, n: int) -> list[int]:
    """Elements of a matrix that each of n ranks holds: FSDP2 deals rows like `torch.chunk`."""
    rows, columns = shape
    bounds = [min(-(-rows // n) * rank, rows) for rank in range(n + 1)]
    return [(end - start) * columns for start, end in pairwise(bounds)]
