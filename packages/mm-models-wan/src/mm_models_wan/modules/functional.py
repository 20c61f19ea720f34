"""The element-wise mathematics of a Wan block, in float32 whatever the compute dtype.

[Note: what a block keeps] Left to autograd, a block keeps for its backward the output of every elementary step. The
functions here keep their inputs and a statistic per token, and redo cheap element-wise steps in the backward: the
normalised values, the sum of modulation and time vector, the GELU. At a model dim of 512 this takes 30 % off what a
block keeps and costs no time (see `benchmarks/step_time.py`).

Shapes: B batch, S tokens, D model dim, H heads, d dims of a head; n is S for one timestep per token, else 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding: cosines first, then sines, frequencies 10000^(−i/half), computed in float64.

    Args:
        timestep: any shape, float32, in [0, 1000].
        dim: size of the embedding, even.

    Returns:
        (*timestep.shape, dim) float32.
    """
    # float64 as in the reference. Timesteps must arrive in float32: bfloat16 merges most of the 1000 grid points.
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angle = timestep.double()[..., None] * torch.pow(10000.0, -exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def layer_norm(x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """LayerNorm over the last dim, computed and returned in float32."""
    affine = (None if weight is None else _wide(weight), None if bias is None else _wide(bias))
    return F.layer_norm(_wide(x), x.shape[-1:], *affine, eps)


def modulated_norm(x: Tensor, shift: tuple[Tensor, Tensor], scale: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """LayerNorm(x)·(1 + scale) + shift, in float32.

    Args:
        x: (B, S, D).
        shift, scale: (parameter (D,), time vector (B, n, D) float32), which are added up.
        eps: of the norm.

    Returns:
        (B, S, D) float32.
    """
    out: Tensor = _ModulatedNorm.apply(x, *shift, *scale, eps)
    return out


def gated_add(x: Tensor, y: Tensor, gate: tuple[Tensor, Tensor]) -> Tensor:
    """x + gate·y in float32, returned in x's dtype; x and y (B, S, D), gate as the vectors of `modulated_norm`."""
    out: Tensor = _GatedAdd.apply(x, y, *gate)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim in float32, cast back to x's dtype *before* the weight is applied."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs by their token's angle, in float32.

    Args:
        x: (B, S, H, d).
        cos, sin: (1, S, 1, d/2) float32.

    Returns:
        like ``x``.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Linear(GELU(x)), with the tanh approximation; x (B, S, D) in the weight's dtype."""
    out: Tensor = _GeluLinear.apply(x, weight, bias)
    return out


def _wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is (for gradient checks)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _to_parameter(grad: Tensor, parameter: Tensor) -> Tensor:
    """Sum the gradient of a vector (B, n, D) into that of its parameter (D,)."""
    return grad.sum((0, 1)).to(parameter.dtype)


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, shift_time: Tensor, scale: Tensor, scale_time: Tensor, eps: float
    ) -> Tensor:
        factor, offset = scale_time + (1 + _wide(scale)), shift_time + _wide(shift)
        wide, size = _wide(x), x.shape[-1:]
        if factor.numel() == len(scale):  # the same for all tokens: torch's own affine form, in one pass
            out, mean, rstd = torch.native_layer_norm(wide, size, factor.flatten(), offset.flatten(), eps)
        else:
            out, mean, rstd = torch.native_layer_norm(wide, size, None, None, eps)
            out.mul_(factor).add_(offset)
        ctx.save_for_backward(x, mean, rstd, shift, scale, scale_time)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, shift, scale, scale_time = ctx.saved_tensors
        factor = scale_time + (1 + _wide(scale))
        if factor.numel() == len(scale):
            d_x, d_scale, d_shift = _layer_norm_backward(grad, x, mean, rstd, factor.flatten())
            d_scale, d_shift = d_scale.view_as(factor), d_shift.view_as(factor)
        else:
            weighted = (_wide(x) - mean).mul_(grad)
            if factor.shape[1] == 1:
                d_scale, d_shift = rstd.transpose(1, 2).bmm(weighted), grad.sum(1, keepdim=True)
            else:
                d_scale, d_shift = weighted.mul_(rstd), grad
            d_x = _layer_norm_backward(grad * factor, x, mean, rstd, None)[0]
        return d_x.to(x.dtype), _to_parameter(d_shift, shift), d_shift, _to_parameter(d_scale, scale), d_scale, None


def _layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; without a weight only the first is made."""
    wanted = [True, weight is not None, weight is not None]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        grad, _wide(x), x.shape[-1:], mean, rstd, weight, weight, wanted
    )
    return gradients


class _GatedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor, gate_time: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate, gate_time)
        return torch.addcmul(_wide(x), _wide(y), gate_time + _wide(gate)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, gate, gate_time = ctx.saved_tensors
        wide, factor = _wide(grad), gate_time + _wide(gate)
        product = wide * y
        if gate_time.shape[1] == 1:
            d_gate, d_y = product.sum(1, keepdim=True), torch.mul(wide, factor, out=product)
        else:
            d_gate, d_y = product, wide * factor
        return grad, d_y.to(y.dtype), _to_parameter(d_gate, gate), d_gate


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = torch.rsqrt(length.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, rstd)
        # The reference casts first; weighting in float32 would round differently in bfloat16.
        return (wide * rstd).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With n = x·rstd and g the gradient: d_weight = Σ n·g, d_x = rstd·(w·g − n·mean(n·w·g)).
        x, weight, rstd = ctx.saved_tensors
        wide, scale = _wide(x), _wide(weight)
        along = wide * grad
        d_weight = along.flatten(0, -2).t().mv(rstd.flatten())
        coefficient = along.matmul(scale).unsqueeze(-1).mul_(rstd.pow(3)).div_(x.shape[-1])
        d_x = torch.mul(_wide(grad), scale, out=along).mul_(rstd).addcmul_(wide, coefficient, value=-1)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = _wide(x).unflatten(-1, (-1, 2))
    # One product of complex numbers; not every accelerator has it, and a compiler fuses only the real ones.
    if x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        angles = torch.complex(cos.to(pairs.dtype), sin.to(pairs.dtype))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    else:
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x, approximate="tanh"), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        activated = F.gelu(x, approximate="tanh")
        d_x = torch.ops.aten.gelu_backward(grad.matmul(weight), x, approximate="tanh")
        rows = grad.flatten(0, -2)
        d_weight = rows.t().mm(activated.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return d_x, d_weight, d_bias
