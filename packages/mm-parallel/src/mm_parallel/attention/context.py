"""Context parallelism as a property of the sequence: split once, attend together, gather once.

[Note: Adjoints] Every rank computes the same full-sequence loss on the gathered output. ``split`` hands back a
gradient that is zero outside the rank's own tokens, ``gather`` one that is the rank's own slice times the group's
size, an all-to-all its inverse. Parameter gradients are then partial sums, times the group's size, on each rank; the
mean over all data and context ranks, which FSDP2 takes anyway, makes them those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mm_parallel.attention.all_to_all import swap_heads_and_tokens
from mm_parallel.attention.kernels import choose_kernel
from mm_parallel.attention.layout import SequenceLayout
from mm_parallel.attention.ring import ring_attention
from mm_parallel.devices import accelerator
from mm_parallel.sizes import check_heads


class ContextParallel:
    """The ranks that share one sample, and how they attend. A model holds one and asks it for :meth:`shard`.

    Args:
        group: all ranks that share a sample, ring-major; None for a single rank.
        ulysses: those of them that exchange heads for tokens; None for one.
        ring: those of them around which keys and values rotate; None for one.
        kernel: the local attention kernel, see :mod:`mm_parallel.attention.kernels`. Under ``auto``, and without a
            ring, attention is ``F.scaled_dot_product_attention``.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None = None,
        ulysses: dist.ProcessGroup | None = None,
        ring: dist.ProcessGroup | None = None,
        kernel: str = "auto",
    ) -> None:
        self.group = group
        self.ulysses = ulysses
        self.ring = ring
        self.kernel = kernel
        self.size = group.size() if group else 1
        self.rank = group.rank() if group else 0

    @classmethod
    def single(cls, *, kernel: str = "auto") -> ContextParallel:
        """For one rank: splits and gathers do nothing, attention is plain."""
        return cls(kernel=kernel)

    def shard(self, length: int, *, causal: bool = False) -> SequenceShard:
        """How a sequence of ``length`` tokens is cut.

        Args:
            length: of the whole sequence; any.
            causal: whether its self-attention is causal, which also settles the order of the cut.
        """
        return SequenceShard(self, length, causal=causal)


class SequenceShard:
    """This rank's part of one sequence: its order, its padding, its positions and its attention.

    Args:
        context: the ranks.
        length: tokens of the whole sequence.
        causal: whether self-attention is causal.
    """

    def __init__(self, context: ContextParallel, length: int, *, causal: bool = False) -> None:
        self._context = context
        self._causal = causal
        ring = context.ring.size() if context.ring else 1
        self._layout = SequenceLayout(length, context.size // ring, ring, zigzag=causal and ring > 1)
        self._runs = self._layout.runs_of(context.rank)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self._layout.length

    @property
    def local_length(self) -> int:
        """Tokens that each rank holds, padding included; equal on all ranks."""
        return self._layout.local

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of ``x``; padding is zero.

        Args:
            x: size ``length`` along ``dim``, equal on all ranks of the group.
            dim: of the tokens.

        Returns:
            Size ``local_length`` along ``dim``. The gradient is zero-filled outside of it, see [Note: Adjoints].

        Raises:
            ValueError: another size.
        """
        self._check_size(x, dim, self.length, "split")
        if self._context.size == 1:
            return x
        return self._take(x, dim)

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The inverse of :meth:`split`, on every rank; padding is dropped.

        Args:
            x: size ``local_length`` along ``dim``.
            dim: of the tokens.

        Returns:
            Size ``length`` along ``dim``; for its gradient see [Note: Adjoints].

        Raises:
            ValueError: another size.
        """
        self._check_size(x, dim, self.local_length, "gather")
        if self._context.size == 1:
            return x
        return _Gather.apply(x, dim, self)

    def positions(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Place of each local token in the whole sequence: (local_length,), int64. Padding repeats the last place."""
        places = [torch.arange(r.global_start, r.global_start + r.length, device=device) for r in self._runs]
        padding = self.local_length - sum(run.length for run in self._runs)
        last = torch.full((padding,), self.length - 1, dtype=torch.int64, device=device)
        return torch.cat([*places, last])

    @contextmanager
    def local_randomness(self) -> Iterator[None]:
        """Draws inside, of dropout on this rank's tokens say, differ from those of the other ranks.

        The ranks that share a sequence run with equal generators, so that what they draw for a whole activation is
        equal; for a split one, equal masks would repeat every ``local_length`` tokens. Inside, torch's global
        generators are set by a number that all ranks draw alike and this rank's place in the group; after it they go on
        as if that number were all that was drawn. On one rank nothing changes. Recompute repeats the draws.
        """
        if self._context.size == 1:
            yield
            return
        drawn = int(torch.randint(2**62, ()))  # from the CPU's generator, so that no device is waited for
        device = accelerator()
        devices = [torch.accelerator.current_device_index()] if device is not None else []
        with torch.random.fork_rng(devices, device_type="cuda" if device is None else device.type):
            torch.manual_seed(drawn + self._context.rank)
            yield

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """Self-attention over the whole sequence.

        Args:
            q, k, v: (B, local_length, H, D), this rank's tokens, with positions already applied.
            scale: of the scores; None is D ** -0.5.

        Returns:
            (B, local_length, H, D).

        Raises:
            ValueError: shapes that don't fit, or heads that the Ulysses degree doesn't divide.
        """
        self._check_attention(q, k, v)
        if self._context.ulysses is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return self._attend(q, k, v, scale).transpose(1, 2)
        # Heads are independent of each other, so a rank can attend for some of them alone, over all tokens.
        q, k, v = swap_heads_and_tokens(self._context.ulysses, q, k, v)
        (out,) = swap_heads_and_tokens(self._context.ulysses, self._attend(q, k, v, scale))
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """q, k, v: (B, H, chunk, D) → the same."""
        context = self._context
        if context.ring is None and context.kernel == "auto":
            if not self._causal:  # under a causal mask no real query sees the padding behind it
                k, v = k[:, :, : self.length], v[:, :, : self.length]
            return F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, scale=scale)
        return ring_attention(
            q,
            k,
            v,
            group=context.ring,
            layout=self._layout,
            causal=self._causal,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            kernel=choose_kernel(context.kernel, q),
        )

    def _take(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        # A rank with nothing but padding takes no tokens of x, but keeps x in its graph: its peers wait for it when
        # the gradients of what made x are reduced.
        pieces = [x.narrow(dim, run.global_start, run.length) for run in self._runs] or [x.narrow(dim, 0, 0)]
        padding = self.local_length - sum(run.length for run in self._runs)
        if padding:  # collectives need the same shape on every rank
            shape = list(x.shape)
            shape[dim] = padding
            pieces.append(x.new_zeros(shape))
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()

    def _put_together(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        runs = self._layout.runs
        return torch.cat([parts[run.rank].narrow(dim, run.local_start, run.length) for run in runs], dim)

    def _check_size(self, x: torch.Tensor, dim: int, expected: int, what: str) -> None:
        if x.shape[dim] != expected:
            raise ValueError(
                f"{what}: expected {expected} tokens along dim {dim}, got shape {tuple(x.shape)} (a sequence of "
                f"{self.length} tokens on {self._context.size} ranks, {self.local_length} each)"
            )

    def _check_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
            raise ValueError(
                "attention: expected q, k, v of one shape (B, local_length, H, D), got "
                f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        self._check_size(q, 1, self.local_length, "attention")
        if self._context.ulysses is not None:
            check_heads(q.shape[2], self._context.ulysses.size())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, shard: SequenceShard) -> torch.Tensor:
        ctx.dim, ctx.shard = dim, shard
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shard._context.size)]
        dist.all_gather(parts, x.contiguous(), group=shard._context.group)
        return shard._put_together(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # No reduction: every rank has the same gradient of the same loss. For the factor see [Note: Adjoints].
        return ctx.shard._take(grad, ctx.dim) * ctx.shard._context.size, None, None
