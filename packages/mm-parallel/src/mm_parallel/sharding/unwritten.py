"""Which of the tensors that `materialize` gave memory to were never filled.

Fresh memory holds whatever was there before. So it is marked: every element gets a bit pattern that no computation
makes (for floating types a NaN whose payload arithmetic doesn't produce, so that a forgotten tensor is loud even where
nobody looks).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARKS = {1: 0xA5, 2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FFDA5A5A5A5A5A5}
"""By bytes per element. One byte has no spare pattern (but for bool): there the whole tensor must hold it."""


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` (this rank's part, if it is a DTensor) with the pattern; returns it."""
    bits = _bits(tensor)
    with torch.no_grad():
        bits.fill_(_MARKS[bits.element_size()])
    return tensor


def find_unwritten(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that still hold the mark, in part or as a whole, on any rank.

    A collective on all ranks, with the same answer on all of them, so that they can raise together: a rank's own part
    may be empty. A tied tensor is named once.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    flags = [_holds_mark(tensor) for _, tensor in tensors if not tensor.is_meta]
    if not flags:
        return []
    found = torch.stack([flag.to(flags[0].device) for flag in flags]).to("cpu", torch.uint8)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    names = [name for name, tensor in tensors if not tensor.is_meta]
    return [name for name, flag in zip(names, found.tolist(), strict=True) if flag]


def _holds_mark(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the tensor's device."""
    bits = _bits(tensor)
    if not bits.numel():
        return torch.zeros((), dtype=torch.bool, device=bits.device)
    marked = bits == _MARKS[bits.element_size()]
    whole = bits.element_size() == 1 and tensor.dtype != torch.bool
    return marked.all() if whole else marked.any()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as integers that share their memory."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.view(_INTEGERS[local.element_size()])
