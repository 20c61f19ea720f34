"""The one reading interface behind loading, converting, exporting and inspecting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import itemsize, to_torch

if TYPE_CHECKING:
    import torch

# Streams hold at most this many bytes of a tensor at a time (per worker).
PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, before any of it is read.

    Attributes:
        shape: its global shape.
        dtype: torch's name of its element type.
        file: the file it is in, for messages.
        storage: equal for two names of the very same bytes (tied tensors); None if that can't happen.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    storage: tuple[str, int] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


class TensorSource(Protocol):
    """Named tensors of which any box can be read without reading the rest; safe to read from several threads."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Everything there is, in stored order."""

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data asked for so far."""

    def read_into(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Read ``box`` of tensor ``key`` into ``out``: a contiguous CPU tensor of the box's shape and stored dtype."""

    def close(self) -> None:
        """Close the files."""


def read_box(source: TensorSource, key: str, box: Box | None = None) -> torch.Tensor:
    """A new CPU tensor with ``box`` (default: all) of tensor ``key``, in its stored dtype."""
    import torch

    info = source.tensors[key]
    box = Box.full(info.shape) if box is None else box
    out = torch.empty(box.sizes, dtype=to_torch(info.dtype))
    source.read_into(key, box, out)
    return out


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is written: on the CPU, contiguous, conjugated and negated; itself if it already is."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy."""
    import torch

    # Not by reshape: a single element may have any stride and is contiguous all the same.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
