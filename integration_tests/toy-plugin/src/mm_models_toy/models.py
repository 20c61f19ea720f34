"""Three sub-models: a frozen autoencoder, a frozen text encoder, and the predictor that is trained.

Shapes: B batch, C latent channels, F frames, H, W height and width of the latents, S tokens, D width, L prompt length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mm_parallel import KeyedInitializer, SequenceShard
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec, Options

LATENT_CHANNELS = 12


class ToyAutoencoder(BaseModel):
    """Not learnt: latents are 2×2 pixel patches, 3 → 12 channels at half the size."""

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec(spatial_multiple=2)

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        """Nothing to initialise."""

    def forward(self, video: Tensor) -> Tensor:
        """(B, 3, F, 2H, 2W) in [−1, 1] → (B, 12, F, H, W)."""
        b, c, f, h, w = video.shape
        patches = video.view(b, c, f, h // 2, 2, w // 2, 2).permute(0, 1, 4, 6, 2, 3, 5)
        return patches.reshape(b, c * 4, f, h // 2, w // 2)


class TextOptions(Options):
    """Keys of ``model.models.text_encoder`` that only this model knows."""

    vocabulary: int = 16
    width: int = 32


class ToyTextEncoder(BaseModel[TextOptions]):
    """One embedding table."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)

    @classmethod
    def from_config(cls, spec: ModelSpec[TextOptions]) -> Self:
        return cls(spec.options.vocabulary, spec.options.width)

    def input_spec(self) -> InputSpec:
        return InputSpec(text_length=4)

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        init.normal_(self.table.weight, f"{prefix}table.weight", std=1.0)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(B, L) ids and mask → (B, L, D), zero where the mask is."""
        features: Tensor = self.table(ids)
        return features * mask.unsqueeze(-1)


class CastLinear(nn.Linear):
    """A Linear that casts its input to its weight's dtype itself.

    The caller can't do it: where this module is a unit of its own, its weight has the compute dtype only while its own
    forward runs.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) in any floating dtype → (…, out) in the weight's."""
        out = F.linear(x.to(self.weight.dtype), self.weight)
        return out if self.bias is None else out + self.bias  # added apart: one fused call may return a view


class ToyBlock(nn.Module):
    """Self-attention, the mean of the prompt added, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = CastLinear(width, 3 * width)
        self.out = CastLinear(width, width)
        self.ffn = nn.Sequential(CastLinear(width, 2 * width), nn.GELU(), CastLinear(2 * width, width))

    def forward(self, x: Tensor, shard: SequenceShard) -> Tensor:
        """(B, S, D) local tokens → the same."""
        b, s, d = x.shape
        q, k, v = self.qkv(F.layer_norm(x, (d,))).view(b, s, 3, self.heads, d // self.heads).unbind(2)
        x = x + self.out(shard.attention(q, k, v).reshape(b, s, d)).to(x.dtype)
        mixed: Tensor = self.ffn(F.layer_norm(x, (d,)))
        return x + mixed.to(x.dtype)


class ToyPredictor(BaseModel):
    """A transformer with one token per latent pixel."""

    key_map = "toy"
    splits_sequence = True
    architectures = {"toy-small": {"width": 32, "heads": 4, "layers": 2}}

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.patch_embedding = CastLinear(LATENT_CHANNELS, width, bias=False)
        self.text_embedding = CastLinear(width, width, bias=False)
        self.blocks = nn.ModuleList(ToyBlock(width, heads) for _ in range(layers))
        self.head = CastLinear(width, LATENT_CHANNELS)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        shapes = cls.read_architecture(spec)
        return cls(shapes["width"], shapes["heads"], shapes["layers"])

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, prefix + name, std=parameter.shape[1] ** -0.5)

    def flops(self, shape: Sequence[int]) -> int:
        tokens = math.prod(shape[1:])
        per_block = 2 * tokens * 8 * self.width**2 + 4 * tokens**2 * self.width
        return len(self.blocks) * per_block + 4 * tokens * LATENT_CHANNELS * self.width

    def forward(self, noised: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        """(B, C, F, H, W), (B,), (B, L, D) → (B, C, F, H, W) in float32."""
        tokens = noised.flatten(2).transpose(1, 2)
        shard = self.context_parallel.shard(tokens.shape[1])
        x = self.patch_embedding(shard.split(tokens)).float()
        text = self.text_embedding(context.mean(1)).float()
        x = x + (text + _sinusoid(timestep, self.width)).unsqueeze(1)
        x = x + _sinusoid(shard.positions().to(x.device), self.width)
        for block in self.blocks:
            x = block(x, shard)
        x = self.head(x).float()
        # A copy, since FSDP2 warns of a forward that returns a view.
        return shard.gather(x).transpose(1, 2).reshape(noised.shape).clone()


def _sinusoid(value: Tensor, width: int) -> Tensor:
    """(N,) → (N, width) float32."""
    frequencies = torch.exp(-math.log(1e4) / (width // 2) * torch.arange(width // 2, device=value.device))
    angles = value.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)
