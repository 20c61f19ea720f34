"""A transformer for the benchmarks."""

from __future__ import annotations

import torch
from torch import nn

from mm_parallel import ContextParallel, SequenceShard


class Block(nn.Module):
    """Self-attention and a feed-forward on this rank's tokens."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(shard.attention(q, k, v).flatten(2))
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    """(B, S, dim) → (B, S, dim)."""

    def __init__(self, dim: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.head = nn.Linear(dim, dim)
        self.context_parallel = ContextParallel.single()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shard = self.context_parallel.shard(x.shape[1])
        x = shard.split(x)
        for block in self.blocks:
            x = block(x, shard)
        return shard.gather(self.head(x) * 1.0)  # not a view: FSDP2 would warn
