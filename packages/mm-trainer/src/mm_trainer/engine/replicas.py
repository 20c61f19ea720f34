"""Whether what every rank holds a copy of is the same on all of them.

Sharding splits parameters; everything else (buffers, ignored parameters, whole sub-models, the replicas of a shard
under HSDP) is replicated and never synchronised again. Copies that differ train models that differ, of which a
checkpoint keeps one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mm_trainer.errors import InputError

_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: nn.Module, *, parameters: bool = True) -> None:
    """Compare checksums of all replicated tensors; called on all ranks.

    Args:
        model: its tensors on meta are left out.
        parameters: False looks at buffers only, the ones that a forward may change.

    Raises:
        InputError: on all ranks that hold a copy of a tensor that differs, with its name.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = [*(model.named_parameters() if parameters else ()), *model.named_buffers()]
    tensors = {name: tensor for name, tensor in named if not tensor.is_meta}
    if any(_differ(torch.tensor([_number("\0".join(tensors))]), dist.group.WORLD)):
        raise InputError("the ranks hold different parameters or buffers: is the model built by rank?")
    differing: list[str] = []
    for group, part in _copies(tensors):
        checksums = torch.stack([_checksum(tensor) for tensor in part.values()]).cpu()
        flags = _differ(checksums, group)
        differing += [name for name, flag in zip(part, flags, strict=True) if flag]
    if differing:
        raise InputError(
            f"{len(differing)} tensor(s) that are replicated differ between ranks: "
            f"{', '.join(differing[:5])}{', …' if len(differing) > 5 else ''}; nothing would make them equal again. "
            "Fill them alike on all ranks, or keep what belongs to a rank out of parameters and buffers"
        )


def _copies(tensors: Mapping[str, Tensor]) -> Iterator[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
    """The ranks that hold copies of the same values, and the tensors for which they do."""
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    assert dist.group.WORLD is not None
    groups: dict[str, tuple[dist.ProcessGroup, dict[str, Tensor]]] = {"": (dist.group.WORLD, plain)}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            for dim, placement in enumerate(tensor.placements):
                if isinstance(placement, Replicate):
                    group = tensor.device_mesh.get_group(dim)
                    groups.setdefault(group.group_name, (group, {}))[1][name] = tensor
    for group, part in groups.values():
        if part and group.size() > 1:
            yield group, part


def _differ(numbers: Tensor, group: dist.ProcessGroup | None) -> list[bool]:
    """Which of the (N,) int64 numbers on the host aren't the same on all ranks of the group."""
    # One MAX gives both bounds: the largest of the complements is that of the smallest.
    bounds = torch.cat([numbers, ~numbers])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds.chunk(2)
    return (most != ~least).tolist()


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """0-dim int64 of this rank's bits, each weighted by its place; sums of integers don't depend on their order."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    if local.is_complex():
        local = torch.view_as_real(local)
    bits = local.view(_INTEGERS[local.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):  # in pieces: as int64 it would take up to eight times the memory
        piece = bits[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(piece), device=bits.device)
        total += (piece * (place * 0x2545F4914F6CDD1D | 1)).sum()
    return total


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
