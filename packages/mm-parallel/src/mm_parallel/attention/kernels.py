"""Attention of some queries to some keys, with what it takes to merge it with attention to other keys.

Every kernel computes, for q (B, H, S, D) and k, v (B, H, T, D):

- ``forward`` → out (B, H, S, D) and lse (B, H, S), the log of the sum of the exponentiated scores of each query, in
  fp32 (fp64 for fp64 inputs);
- ``backward`` → dq, dk, dv, given any out and lse: those of the merged attention to all keys give this block's share
  of the gradients.

``causal`` means that query i sees keys 0..i, and needs S = T.

Not all of them can run everywhere: ``flash`` needs CUDA and half precision, ``npu`` an NPU with torch_npu. Where this
package is developed neither exists; their adapters are tested against stand-ins with the documented signatures.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from mm_parallel.config import ATTENTION_KERNELS

_log = logging.getLogger(__name__)

ForwardKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """A pair of functions.

    Args:
        name: as in the config.
        forward: ``(q, k, v, causal, scale) → (out, lse)``.
        backward: ``(dout, q, k, v, out, lse, causal, scale) → (dq, dk, dv)``.
    """

    name: str
    forward: ForwardKernel
    backward: Callable[..., Gradients]


def choose_kernel(name: str, q: torch.Tensor) -> AttentionKernel:
    """The kernel called ``name``; ``auto`` is the fastest that can take queries like ``q`` (B, H, S, D). Logged once.

    Raises:
        ValueError: an unknown name, or one that can't run on this device or dtype.
    """
    device_type, dtype = q.device.type, q.dtype
    half = dtype in (torch.bfloat16, torch.float16)  # all that the fused kernels of CUDA and NPU take
    if name not in ATTENTION_KERNELS:
        raise ValueError(f"attention_kernel: expected one of {', '.join(ATTENTION_KERNELS)}, got {name!r}")
    if name == "auto":
        flash = "flash" if half and q.shape[-1] % 8 == 0 else "math"
        name = {"cuda": flash, "npu": "npu" if half else "math", "cpu": "cpu_flash"}.get(device_type, "math")
    needs = {"flash": "cuda", "npu": "npu", "cpu_flash": "cpu"}.get(name, device_type)
    if needs != device_type or (name in ("flash", "npu") and not half):
        raise ValueError(f"attention_kernel: {name} runs on {needs}{_PRECISION[name]}, got {device_type} and {dtype}")
    _report(name, device_type, dtype)
    return KERNELS[name]


@cache
def _report(name: str, device_type: str, dtype: torch.dtype) -> None:
    _log.info("context-parallel attention on %s in %s uses the kernel %r", device_type, dtype, name)


_PRECISION = {"flash": " in bf16 or fp16", "npu": " in bf16 or fp16", "cpu_flash": ""}


def _cpu_flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(q, k, v, 0.0, causal, scale=scale)


def _cpu_flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    # Cumulative lengths are for packed sequences, the two trailing tensors are the state of dropout: both unused.
    unused = torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )


_NPU_STATISTICS = 8  # the NPU kernel repeats each row's maximum and sum 8 times, for alignment
_NPU_CAUSAL = 3  # sparse_mode: the right-down causal mask, given as a compressed 2048 × 2048 triangle


def _npu_mask(causal: bool, device: torch.device) -> torch.Tensor | None:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1) if causal else None


def _npu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    torch_npu = importlib.import_module("torch_npu")
    out, softmax_max, softmax_sum, *_ = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        head_num=q.shape[1],
        input_layout="BNSD",
        scale=scale,
        keep_prob=1.0,
        atten_mask=_npu_mask(causal, q.device),
        sparse_mode=_NPU_CAUSAL if causal else 0,
    )
    return out, softmax_max[..., 0] + softmax_sum[..., 0].log()


def _npu_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    torch_npu = importlib.import_module("torch_npu")
    # exp(score - max) / sum with max = lse and sum = 1 is the merged attention's probability.
    softmax_max = lse.unsqueeze(-1).expand(*lse.shape, _NPU_STATISTICS).contiguous()
    dq, dk, dv, *_ = torch_npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        dout,
        head_num=q.shape[1],
        input_layout="BNSD",
        softmax_max=softmax_max,
        softmax_sum=torch.ones_like(softmax_max),
        attention_in=out,
        scale_value=scale,
        keep_prob=1.0,
        atten_mask=_npu_mask(causal, q.device),
        sparse_mode=_NPU_CAUSAL if causal else 0,
    )
    return dq, dk, dv


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)  # blocks are merged by their lse, for which bf16 is too coarse
    scores = _scores(q.to(wide), k.to(wide), causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.to(wide)
    return out.to(q.dtype), lse


def _math_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    dout, q, k, v, out = (t.to(wide) for t in (dout, q, k, v, out))
    probabilities = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    dprobabilities = dout @ v.transpose(-1, -2)
    # The row sum of dout · out runs over all keys, not only this block's: hence the merged out.
    dscores = probabilities * (dprobabilities - (dout * out).sum(-1, keepdim=True)) * scale
    gradients = dscores @ k, dscores.transpose(-1, -2) @ q, probabilities.transpose(-1, -2) @ dout
    dq, dk, dv = (g.to(dtype) for g in gradients)
    return dq, dk, dv


KERNELS = {
    kernel.name: kernel
    for kernel in (
        AttentionKernel("flash", _flash_forward, _flash_backward),
        AttentionKernel("npu", _npu_forward, _npu_backward),
        AttentionKernel("cpu_flash", _cpu_flash_forward, _cpu_flash_backward),
        AttentionKernel("math", _math_forward, _math_backward),
    )
}
