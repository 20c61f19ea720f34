"""The parts of the Wan diffusion transformer, with the parameter names of the original release.

[Note: precision] The compute dtype is that of the weights at the time of the forward, which FSDP2's mixed precision
chooses. Every layer casts its own input to its weight's dtype; norms, modulation, rotation and residual sums compute in
float32; the time embedding and the head's Linear are float32 altogether (the weights are cast up). The residual stream
keeps whatever dtype the model gives it, and a block returns the dtype it got.

Shapes: B batch, S local tokens, D model dim, T text positions; n is S for one timestep per token, else 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mm_models_wan.modules.functional import gated_add, gelu_linear, layer_norm, modulated_norm, rms_norm, rotate
from mm_models_wan.weights.architecture import WanArchitecture
from mm_parallel import SequenceShard


class Context(NamedTuple):
    """What cross-attention reads; never split over a context-parallel group."""

    text: Tensor
    """(B, T, D)."""
    image: Tensor | None
    """(B, image tokens, D): Wan2.1 image-to-video models only."""


class LocalTokens(NamedTuple):
    """Where this rank's tokens stand in the sequence."""

    shard: SequenceShard
    cos: Tensor
    """(1, S, 1, head_dim / 2) float32, of the local tokens."""
    sin: Tensor


class Fp32Linear(nn.Linear):
    """A Linear that computes in float32 whatever dtype its weight has."""

    def forward(self, x: Tensor) -> Tensor:
        # The bias is added apart: one fused call may return a view, which a unit of FSDP2 must not.
        return F.linear(x.float(), self.weight.float()) + self.bias.float()


class CastLinear(nn.Linear):
    """A Linear that casts its input to its weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class GeluLinear(nn.Linear):
    """GELU, then a Linear that casts its input to its weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu_linear(x.to(self.weight.dtype), self.weight, self.bias)


class RMSNorm(nn.Module):
    """RMSNorm over the full model dim, before the split into heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Fp32LayerNorm(nn.LayerNorm):
    """LayerNorm with affine, computed and returned in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.eps, self.weight, self.bias)


class PatchEmbedding(nn.Conv3d):
    """A Conv3d whose kernel is its stride, computed as the matrix product it is.

    (B, C, F, H, W) → (B, tokens, D), tokens in order (frame, height, width).
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *sizes = x.shape
        (f, pf), (h, ph), (w, pw) = ((size // p, p) for size, p in zip(sizes, self.kernel_size, strict=True))
        patches = x.to(self.weight.dtype).reshape(batch, channels, f, pf, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
        return F.linear(patches.reshape(batch, f * h * w, channels * pf * ph * pw), self.weight.flatten(1), self.bias)


class SelfAttention(nn.Module):
    """Attention over the whole sequence, of which this rank holds a part."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (CastLinear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def forward(self, x: Tensor, tokens: LocalTokens) -> Tensor:
        x = x.to(self.q.weight.dtype)  # one copy for the three; where q is a unit of its own, each makes its own
        q, k = (
            rotate(self._split(y), tokens.cos, tokens.sin) for y in (self.norm_q(self.q(x)), self.norm_k(self.k(x)))
        )
        out: Tensor = self.o(tokens.shard.attention(q, k, self._split(self.v(x))).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1))


class CrossAttention(nn.Module):
    """Local tokens attend to all text positions, padding included: that is how the models were trained."""

    def __init__(self, dim: int, heads: int, eps: float, image_dim: int | None) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (CastLinear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, eps), RMSNorm(dim, eps)
        if image_dim is not None:
            self.k_img, self.v_img = CastLinear(image_dim, dim), CastLinear(image_dim, dim)
            self.norm_k_img = RMSNorm(dim, eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self._split(self.norm_q(self.q(x)))
        attended = self._attend(q, self.norm_k(self.k(context.text)), self.v(context.text))
        if context.image is not None:
            attended = attended + self._attend(q, self.norm_k_img(self.k_img(context.image)), self.v_img(context.image))
        out: Tensor = self.o(attended)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self._split(k).transpose(1, 2), self._split(v).transpose(1, 2)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1))


class Block(nn.Module):
    """Self-attention, cross-attention and feed-forward, the first and last modulated by the timestep."""

    def __init__(self, architecture: WanArchitecture) -> None:
        super().__init__()
        dim, heads, self.eps = architecture.dim, architecture.num_attention_heads, architecture.eps
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)
        self.self_attn = SelfAttention(dim, heads, self.eps)
        self.norm3 = Fp32LayerNorm(dim, self.eps) if architecture.cross_attn_norm else nn.Identity()
        self.cross_attn = CrossAttention(dim, heads, self.eps, architecture.added_kv_proj_dim)
        # The Identity holds the GELU's place, so that the second Linear keeps its name. That Linear computes the GELU
        # itself, so the activated tensor needn't be kept for the backward.
        self.ffn = nn.Sequential(
            CastLinear(dim, architecture.ffn_dim), nn.Identity(), GeluLinear(architecture.ffn_dim, dim)
        )

    def forward(self, x: Tensor, time: tuple[Tensor, ...], context: Context, tokens: LocalTokens) -> Tensor:
        """x (B, S, D); time: six (B, n, D) float32 → (B, S, D) in x's dtype."""
        vectors = zip(self.modulation.squeeze(0).unbind(0), time, strict=True)
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = vectors
        x = gated_add(x, self.self_attn(modulated_norm(x, shift, scale, self.eps), tokens), gate)
        x = x + self.cross_attn(self.norm3(x), context).to(x.dtype)
        return gated_add(x, self.ffn(modulated_norm(x, shift_ffn, scale_ffn, self.eps)), gate_ffn)


class Head(nn.Module):
    """Modulated norm and projection to the patches' pixels, in float32."""

    def __init__(self, architecture: WanArchitecture) -> None:
        super().__init__()
        dim, self.eps = architecture.dim, architecture.eps
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        self.head = Fp32Linear(dim, architecture.out_channels * architecture.patch_volume)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x (B, S, D); time (B, n, D) float32 → (B, S, out_channels · patch volume) float32."""
        shift, scale = self.modulation.squeeze(0).unbind(0)
        out: Tensor = self.head(modulated_norm(x, (shift, time), (scale, time), self.eps))
        return out


class ImageEmbedding(nn.Module):
    """CLIP image tokens → model dim (Wan2.1 image-to-video models only)."""

    def __init__(self, image_dim: int, dim: int, positions: int | None) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            Fp32LayerNorm(image_dim, eps=1e-5),
            CastLinear(image_dim, image_dim),
            nn.GELU(),
            CastLinear(image_dim, dim),
            Fp32LayerNorm(dim, eps=1e-5),
        )
        self.emb_pos = None if positions is None else nn.Parameter(torch.zeros(1, positions, image_dim))

    def forward(self, image: Tensor) -> Tensor:
        """(B, image tokens, image_dim) → (B, image tokens, D); with positions, two images of one sample come as rows
        2i and 2i+1 and leave as one row."""
        if self.emb_pos is not None:
            image = image.reshape(-1, 2 * image.shape[1], image.shape[2]) + self.emb_pos
        out: Tensor = self.proj(image)
        return out
