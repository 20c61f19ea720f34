"""A transformer that splits its sequence, and one with buffers that change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mm_parallel import KeyedInitializer, SequenceShard
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec

VOCABULARY, WIDTH, HEADS = 64, 32, 2


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, shard: SequenceShard) -> Tensor:
        """(B, S, D) of this rank's tokens → the same."""
        b, s, d = x.shape
        normed = F.layer_norm(x, (d,)).to(self.qkv.weight.dtype)
        q, k, v = self.qkv(normed).view(b, s, 3, HEADS, d // HEADS).unbind(2)
        x = x + self.out(shard.attention(q, k, v).reshape(b, s, d))
        mixed: Tensor = self.ffn(F.layer_norm(x, (d,)).to(self.qkv.weight.dtype))
        return x + mixed


class PlainTransformer(BaseModel):
    """Guesses every token from all the others, with one token in eight blanked; returns an object with a loss alone."""

    splits_sequence = True
    blanked = 1 / 8

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            init.normal_(parameter, prefix + name, std=0.2)

    def forward(self, ids: Tensor, **rest: Any) -> Any:
        """(B, L) int64 → mean cross-entropy over all tokens."""
        # Drawn for the whole sequence, so that the ranks that share it blank the same tokens.
        kept = torch.rand(ids.shape, device=ids.device) >= self.blanked
        shard = self.context_parallel.shard(ids.shape[1])
        x = shard.split(self.table(ids) * kept.unsqueeze(-1))
        for block in self.blocks:
            x = block(x, shard)
        logits = shard.gather(self.head(x).float())
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits=logits)


class CountingTransformer(PlainTransformer):
    """Weighs its loss by how many batches it has seen, in a buffer that is saved, and keeps one that isn't."""

    blanked = 0.0
    seen: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, ids: Tensor, **rest: Any) -> Any:
        if self.training:
            self.seen += 1
        weight = 1 - 0.5 ** self.seen.float()
        self.last.copy_(weight)
        return SimpleNamespace(loss=super().forward(ids).loss * weight)
