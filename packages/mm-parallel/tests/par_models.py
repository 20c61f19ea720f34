"""A generic transformer and its helpers, for the tests of mm-parallel only.

``Denoiser`` follows the rules that this package sets for models: it splits the sequence once and gathers it once,
takes positions from the shard, and casts for itself inside the forward of the unit that owns the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from mm_parallel import ContextParallel


def rotate(x, angles):
    """Rotary positions: x (B, S, H, D), angles (S, D/2)."""
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.v, self.o = (nn.Linear(dim, dim) for _ in range(3))
        # Softmax ignores what all keys have in common: a bias here would have a gradient of pure rounding noise,
        # which Adam blows up to full steps.
        self.k = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context=None, *, angles=None, shard=None):
        source = x if context is None else context
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (self.q(x), self.k(source), self.v(source)))
        if context is None:
            out = shard.attention(rotate(q, angles), rotate(k, angles), v)
        else:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(out.flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.cross_attn = Attention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.modulation = nn.Parameter(torch.randn(1, 4, dim) / dim**0.5)

    def forward(self, x, time, context, angles, shard):
        shift1, scale1, shift2, scale2 = (self.modulation.float() + time.float()).chunk(4, 1)
        dtype = x.dtype
        y = F.layer_norm(x.float(), x.shape[-1:]) * (1 + scale1) + shift1
        x = x + self.self_attn(y.to(dtype), angles=angles, shard=shard)
        x = x + self.cross_attn(F.layer_norm(x.float(), x.shape[-1:]).to(dtype), context)
        y = F.layer_norm(x.float(), x.shape[-1:]) * (1 + scale2) + shift2
        return x + self.ffn(y.to(dtype))


class Head(nn.Module):
    def __init__(self, dim, channels):
        super().__init__()
        self.linear = nn.Linear(dim, channels)
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x):
        x = F.layer_norm(x.float(), x.shape[-1:]).to(self.linear.weight.dtype)
        return self.linear(x).float() * self.scale.float()


class Denoiser(nn.Module):
    """(B, S, channels), (B,), (B, T, text) → (B, S, channels)."""

    def __init__(self, dim=32, heads=4, layers=2, channels=6, text=8, hidden=52, causal=False, context=True):
        super().__init__()
        self.causal = causal
        self.embed = nn.Linear(channels, dim)
        self.time = nn.Linear(8, 4 * dim)
        self.text = nn.Linear(text, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.head = Head(dim, channels)
        frequencies = 1 / 10000 ** (torch.arange(0, dim // heads, 2) / (dim // heads))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.context_parallel = ContextParallel.single()

    def set_context_parallel(self, context_parallel):
        self.context_parallel = context_parallel

    def forward(self, x, t, text):
        dtype = self.embed.weight.dtype
        shard = self.context_parallel.shard(x.shape[1], causal=self.causal)
        angles = shard.positions(x.device)[:, None] * self.frequencies
        phase = t.float()[:, None] * torch.arange(1, 5)
        time = self.time(torch.cat((phase.sin(), phase.cos()), -1).to(dtype)).unflatten(-1, (4, -1))
        text = self.text(text.to(dtype))
        h = shard.split(self.embed(x.to(dtype)))
        for block in self.blocks:
            h = block(h, time, text, angles, shard)
        return shard.gather(self.head(h))


class Encoder(nn.Module):
    """Token ids (B, T) → (B, T, dim); its output projection is tied to its table."""

    def __init__(self, tokens=29, dim=8, layers=2):
        super().__init__()
        self.shared = nn.Embedding(tokens, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])
        self.out = nn.Linear(dim, tokens, bias=False)
        self.out.weight = self.shared.weight

    def forward(self, ids):
        x = self.shared(ids)
        for block in self.blocks:
            x = x + block(x)
        return x + self.out(x).softmax(-1) @ self.shared.weight


class Pipeline(nn.Module):
    """A container of three sub-models: plain ae, frozen text encoder, trained predictor."""

    def __init__(self, **options):
        super().__init__()
        self.ae = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.text_encoder = Encoder()
        self.predictor = Denoiser(**options)
        self.ae.requires_grad_(False)
        self.text_encoder.requires_grad_(False)

    def loss(self, x, t, ids, noise):
        with torch.no_grad():
            latents, text = self.ae(x), self.text_encoder(ids)
        return F.mse_loss(self.predictor(latents + noise, t, text), noise)


def batch(*keys, tokens=24):
    """One sample per key: the same on any rank."""
    samples = []
    for key in keys:
        generator = torch.Generator().manual_seed(1000 + key)
        samples.append(
            (
                torch.randn(tokens, 6, generator=generator),
                torch.rand((), generator=generator),
                torch.randint(0, 29, (5,), generator=generator),
                torch.randn(tokens, 6, generator=generator),
            )
        )
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


def whole(tensor):
    """The full value of a sharded or plain tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
