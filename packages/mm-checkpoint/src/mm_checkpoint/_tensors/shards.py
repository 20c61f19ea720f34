"""A rank's own part of a tensor, and filling it from a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import to_torch
from mm_checkpoint._tensors.source import PIECE_BYTES, TensorSource
from mm_checkpoint.errors import BadInputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LocalPart:
    """The memory this process holds of a tensor, and which box of the whole it is."""

    tensor: torch.Tensor
    box: Box


def local_part(tensor: torch.Tensor) -> LocalPart:
    """A plain tensor is all of itself; a DTensor's local shard is the box its placements give it.

    Raises:
        BadInputError: a DTensor that is not one box per rank.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return LocalPart(tensor.detach(), Box.full(tuple(tensor.shape)))
    chunks = tensor.__create_chunk_list__()  # the protocol through which DCP asks a tensor for its shards
    local = tensor.to_local().detach()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise BadInputError(f"a DTensor with placements {tensor.placements} is not one box per rank")
    return LocalPart(local, Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)))


def fill(part: LocalPart, source: TensorSource, name: str) -> None:
    """Read this process's box of ``name``, straight into its memory if the stored bytes fit there unchanged."""
    import torch

    local, stored = part.tensor, to_torch(source.tensors[name].dtype)
    if local.numel() == 0:
        return
    if local.device.type == "cpu" and local.dtype == stored and local.is_contiguous():
        source.read_into(name, part.box, local)
        return
    # Otherwise (another device, dtype or layout) the bytes pass through one small buffer, whatever the tensor's size.
    scratch = torch.empty(min(PIECE_BYTES, part.box.numel * stored.itemsize), dtype=torch.uint8)
    for box in part.box.pieces(PIECE_BYTES // stored.itemsize):
        piece = scratch[: box.numel * stored.itemsize].view(stored).reshape(box.sizes)
        source.read_into(name, box, piece)
        local[box.relative_to(part.box.offsets).slices].copy_(piece)
