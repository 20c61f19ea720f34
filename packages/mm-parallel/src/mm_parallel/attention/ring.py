"""Attention over a sequence whose chunks are spread over a ring of ranks: keys and values travel, queries stay.

[Note: Ring] With n ranks, keys and values make n - 1 hops in the forward and n - 1 in the backward. Their gradients
make n - 1 hops too, not n: the sum for a chunk starts on the rank after its home, so the home's own share, computed
first and kept there, is added when the sum arrives. A hop is in flight while the chunk at hand is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mm_parallel.attention.kernels import AttentionKernel
from mm_parallel.attention.layout import SequenceLayout

_KV_TAG, _GRADIENT_TAG = 0, 1  # both kinds of message are in flight between the same two ranks at once


@dataclass(frozen=True)
class _Block:
    """Which queries see which keys of a visiting chunk: ``rows`` of the queries, the chunk's first ``keys`` keys."""

    rows: slice
    keys: int
    causal: bool


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    layout: SequenceLayout,
    causal: bool,
    scale: float,
    kernel: AttentionKernel,
) -> torch.Tensor:
    """Attention of this rank's chunk of queries to all keys.

    Args:
        q, k, v: (B, H, chunk, D), this rank's chunk in the order of ``layout``.
        group: the ring; None for a single rank.
        layout: where chunks lie, and where padding begins.
        causal: each token sees itself and what comes before it; with several ranks the layout must be zigzag.
        scale: of the scores.
        kernel: for one block.

    Returns:
        (B, H, chunk, D). Rows of padding hold finite values without meaning.
    """
    return _RingAttention.apply(q, k, v, _Ring(group, layout, causal, scale, kernel))


class _Ring:
    """One rank's view of the ring."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        layout: SequenceLayout,
        causal: bool,
        scale: float,
        kernel: AttentionKernel,
    ) -> None:
        self.group = group
        self.size = group.size() if group else 1
        self.rank = group.rank() if group else 0
        self.layout = layout
        self.causal = causal
        self.scale = scale
        self.kernel = kernel

    def block(self, step: int) -> _Block | None:
        """What to compute when the chunk from ``step`` ranks back visits; None if it holds only padding."""
        source, rows = (self.rank - step) % self.size, slice(0, self.layout.chunk)
        if not self.causal:
            valid = self.layout.valid_in_chunk(source)
            return _Block(rows, valid, causal=False) if valid else None
        # Padding comes last, so no real query sees it under a causal mask. For the rest see `SequenceLayout`: of the
        # two runs in each chunk, an earlier rank's first and both of a later rank's come before our later run.
        if step == 0:
            return _Block(rows, self.layout.chunk, causal=True)
        half = self.layout.chunk // 2
        if source < self.rank:
            return _Block(rows, half, causal=False)
        return _Block(slice(half, self.layout.chunk), self.layout.chunk, causal=False)

    def pass_on(self, tensor: torch.Tensor, tag: int) -> _Hop:
        """Send ``tensor`` to the next rank and receive the previous one's; both are in flight when this returns."""
        # One batch: on NCCL, sends around a ring whose receives are issued after them can wait for each other.
        received = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after, tag=tag),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
            ]
        )
        return _Hop(tensor, received, works)


@dataclass
class _Hop:
    """A message in flight; holds on to what is sent until it has been."""

    sent: torch.Tensor
    received: torch.Tensor
    works: list[Any]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: _Ring) -> torch.Tensor:
        q, kv = q.contiguous(), torch.stack((k, v))
        out, lse = _attend(q, kv, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = _attend_backward(dout.contiguous(), q, kv, out, lse, ctx.ring)
        return dq.to(q.dtype), dkv[0].to(kv.dtype), dkv[1].to(kv.dtype), None


def _attend(q: torch.Tensor, kv: torch.Tensor, ring: _Ring) -> tuple[torch.Tensor, torch.Tensor]:
    """→ out in q's dtype, lse in fp32 or fp64."""
    wide = torch.promote_types(q.dtype, torch.float32)  # otherwise every merge would round to bf16
    merged: tuple[torch.Tensor, torch.Tensor] | None = None
    for step in range(ring.size):
        # Sent on before the block is computed, so that the transfer overlaps it.
        hop = ring.pass_on(kv, _KV_TAG) if step < ring.size - 1 else None
        block = ring.block(step)
        if block is not None:
            rows, keys = block.rows, block.keys
            out, lse = ring.kernel.forward(
                q[:, :, rows], kv[0, :, :, :keys], kv[1, :, :, :keys], block.causal, ring.scale
            )
            if merged is None:  # the first block holds all rows
                merged = out.to(wide), lse.to(wide)
            else:
                _merge(merged[0][:, :, rows], merged[1][:, :, rows], out.to(wide), lse.to(wide))
        if hop is not None:
            kv = hop.wait()
    assert merged is not None, "a sequence has at least one token"
    return merged[0].to(q.dtype), merged[1]


def _merge(out: torch.Tensor, lse: torch.Tensor, out_block: torch.Tensor, lse_block: torch.Tensor) -> None:
    """Make ``out`` and ``lse`` those of both sets of keys, in place."""
    # By sigmoids of the difference: exponentials of the two themselves could overflow.
    out.lerp_(out_block, torch.sigmoid(lse_block - lse).unsqueeze(-1))
    lse.copy_(lse_block - F.logsigmoid(lse_block - lse))


def _attend_backward(
    dout: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, ring: _Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ dq and the gradient of this rank's keys and values, both fp32 or fp64; see [Note: Ring]."""
    dq = torch.zeros_like(q, dtype=lse.dtype)
    own = torch.zeros_like(kv, dtype=lse.dtype)  # sums over ranks, in fp32: bf16 would round at every hop
    gradient_hop = None
    for step in range(ring.size):
        hop = ring.pass_on(kv, _KV_TAG) if step < ring.size - 1 else None
        dkv = own if step == 0 else torch.zeros_like(own)
        block = ring.block(step)
        if block is not None:
            rows, keys = block.rows, block.keys
            dq_block, dk_block, dv_block = ring.kernel.backward(
                dout[:, :, rows],
                q[:, :, rows],
                kv[0, :, :, :keys],
                kv[1, :, :, :keys],
                out[:, :, rows],
                lse[:, :, rows],
                block.causal,
                ring.scale,
            )
            dq[:, :, rows] += dq_block
            dkv[0, :, :, :keys] += dk_block
            dkv[1, :, :, :keys] += dv_block
        if step > 0:
            if gradient_hop is not None:
                dkv += gradient_hop.wait()
            gradient_hop = ring.pass_on(dkv, _GRADIENT_TAG)
        if hop is not None:
            kv = hop.wait()
    return dq, own if gradient_hop is None else own + gradient_hop.wait()
