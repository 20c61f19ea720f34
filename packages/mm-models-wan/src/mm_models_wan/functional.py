"""The element-wise mathematics of a Wan block, in float32 whatever the compute dtype.

Shapes: B batch, S tokens, D model dim, H heads, d dims of a head; n is S for one timestep per token, else 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding: cosines first, then sines, frequencies 10000^(−i/half), computed in float64.

    Args:
        timestep: any shape, float32, in [0, 1000].
        dim: size of the embedding, even.

    Returns:
        (*timestep.shape, dim) float32.
    """
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.double()[..., None] * torch.pow(10000.0, -exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def layer_norm(x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """LayerNorm over the last dim, computed and returned in float32."""
    affine = (None if weight is None else weight.float(), None if bias is None else bias.float())
    return F.layer_norm(x.float(), x.shape[-1:], *affine, eps)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm(x)·(1 + scale) + shift in float32; x (B, S, D), shift and scale (B, n, D)."""
    return torch.addcmul(shift, layer_norm(x, eps), 1 + scale)


def gated_add(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + gate·y in float32, returned in x's dtype; x and y (B, S, D), gate (B, n, D) float32."""
    return torch.addcmul(x.float(), y.float(), gate).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim in float32, cast back to x's dtype *before* the weight is applied."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs by their token's angle, in float32.

    Args:
        x: (B, S, H, d).
        cos, sin: (1, S, 1, d/2) float32.

    Returns:
        like ``x``.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
