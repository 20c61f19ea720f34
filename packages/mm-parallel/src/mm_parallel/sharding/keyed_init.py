"""Random initialisation that is the same on any number of ranks and costs each rank only its own shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK = 2**20  # part of what the numbers are drawn from: another size gives other weights for the same seed

_Fill = Callable[[torch.Tensor, torch.Generator], object]


class KeyedInitializer:
    """Fills plain or sharded parameters with numbers drawn from (seed, key, block of 2**20 flat elements).

    A rank draws only the blocks that its shard touches. (``normal_`` has no prefix property: the first half of a draw
    of n differs from a draw of n/2. Without blocks, every rank would have to draw every tensor whole.) Numbers are
    drawn in fp32 on the CPU and rounded to the parameter's dtype, which makes them equal on every device.

    Args:
        seed: of the run.
        only: fill these tensors and leave all others as they are; None: all.
    """

    def __init__(self, seed: int, *, only: Collection[torch.Tensor] | None = None) -> None:
        self.seed = seed
        self._only = None if only is None else {id(tensor) for tensor in only}

    def normal_(self, param: torch.Tensor, key: str, std: float, mean: float = 0.0) -> None:
        """Fill with N(mean, std²); ``key`` is usually the parameter's name."""
        self._fill(param, key, lambda block, generator: block.normal_(mean, std, generator=generator))

    def uniform_(self, param: torch.Tensor, key: str, bound: float) -> None:
        """Fill with U(-bound, bound)."""
        self._fill(param, key, lambda block, generator: block.uniform_(-bound, bound, generator=generator))

    def zeros_(self, param: torch.Tensor) -> None:
        """Fill with zeros."""
        self._set(param, 0)

    def ones_(self, param: torch.Tensor) -> None:
        """Fill with ones."""
        self._set(param, 1)

    @torch.no_grad()
    def _set(self, param: torch.Tensor, value: int) -> None:
        if self._fills(param):
            _local(param)[0].fill_(value)

    def _fills(self, param: torch.Tensor) -> bool:
        return self._only is None or id(param) in self._only

    @torch.no_grad()
    def _fill(self, param: torch.Tensor, key: str, fill: _Fill) -> None:
        if not self._fills(param):
            return
        local, start = _local(param)
        target, total = local.view(-1), param.numel()
        stop = start + target.numel()
        for index in range(start // BLOCK, -(-stop // BLOCK)):
            first = index * BLOCK
            block = torch.empty(min(BLOCK, total - first))
            fill(block, self._generator(key, index))
            low, high = max(start, first), min(stop, first + len(block))
            target[low - start : high - start].copy_(block[low - first : high - first])

    def _generator(self, key: str, block: int) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}\0{key}\0{block}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _local(param: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part, contiguous, and the flat index of its first element in the whole tensor."""
    if not isinstance(param, DTensor):
        return _contiguous(param), 0
    if any(not isinstance(p, Replicate) and p != Shard(0) for p in param.placements):
        raise NotImplementedError(f"expected a parameter sharded on dim 0 only, got placements {param.placements}")
    local = _contiguous(param.to_local())
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    row = param.numel() // param.shape[0] if param.shape[0] else 0
    return local, offset[0] * row if local.numel() else 0


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous parameter, got strides {tensor.stride()} for {tuple(tensor.shape)}")
    return tensor
