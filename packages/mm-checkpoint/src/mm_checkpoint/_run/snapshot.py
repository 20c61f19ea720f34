"""What one rank contributes to a checkpoint, frozen at the moment of the save."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_checkpoint._formats.dcp_writer import pickle_value
from mm_checkpoint._run.state import flatten
from mm_checkpoint._tensors.dtypes import from_torch
from mm_checkpoint._tensors.source import as_stored, bytes_of
from mm_checkpoint.errors import BadInputError

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import SavePlan

# Replicated values are compared between ranks up to this size; larger ones are weights, not bookkeeping.
COMPARED_BYTES = 64 << 10
# Training waits for the snapshot of a background save, and torch itself often has only one thread per rank.
COPY_THREADS = 2


@dataclass(frozen=True)
class Contribution:
    """What rank 0 has to know about a rank to settle who writes what.

    Attributes:
        plan: torch's local save plan: the chunks that this rank could write.
        paths: flat name to the keys that lead to it.
        ties: groups of names that are the same memory on this rank.
        empty: names of which this rank holds no element, so that it can't tell what they are tied to.
        replicated: checksums of all plain values and small plain tensors, which have to be equal on all ranks.
    """

    plan: SavePlan
    paths: dict[str, tuple[str, ...]]
    ties: list[tuple[str, ...]]
    empty: set[str]
    replicated: dict[str, int]


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a state.

    Attributes:
        chunks: this rank's memory of each tensor (the live one, or a copy for a background save).
        values: the pickled plain values.
        contribute: makes the rest; it looks only at shapes and placements, so it may run in the background too.
    """

    chunks: dict[str, torch.Tensor]
    values: dict[str, bytes]
    contribute: Callable[[], Contribution]


def take_snapshot(state: Mapping[str, Any], *, is_first: bool, staging: dict[str, torch.Tensor] | None) -> Snapshot:
    """Capture this rank's part of ``state``, without any communication.

    Args:
        state: nested mappings of tensors, DTensors and plain values.
        is_first: whether this is rank 0.
        staging: buffers to copy the tensors into (allocated as needed, kept by the caller for the next save), so that
            the state may change while it is written; None writes from the live memory.

    Raises:
        BadInputError: a tensor that can't be stored (sparse, quantised, on meta).
        TypeError: a plain value that wouldn't load again.
        ValueError: two entries with one flat name.
    """
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.tensor import DTensor

    flat = flatten(state)
    for name, tensor in flat.tensors.items():
        _check_storable(name, tensor)
    with torch.no_grad():  # else `to_local` records itself for autograd
        chunks = {n: (t.to_local() if isinstance(t, DTensor) else t).detach() for n, t in flat.tensors.items()}
    # Pickled now, not when written: a background save must not see what training changes meanwhile.
    values = {name: pickle_value(value) for name, value in flat.values.items()}
    ties = _find_ties(chunks)
    empty = {name for name, chunk in chunks.items() if chunk.numel() == 0}
    replicated = {name: zlib.crc32(value) for name, value in values.items()}
    for name, tensor in flat.tensors.items():
        if not isinstance(tensor, DTensor) and tensor.nbytes <= COMPARED_BYTES:
            replicated[name] = zlib.crc32(bytes_of(as_stored(chunks[name])))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({**flat.tensors, **flat.values}, is_coordinator=is_first)
    return Snapshot(
        chunks if staging is None else _copy(chunks, ties, staging),
        values,
        lambda: Contribution(planner.create_local_plan(), flat.paths, ties, empty, replicated),
    )


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "on meta" if tensor.is_meta else "quantised" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise BadInputError(f"state: {name} is {kind} and can't be saved")
    try:
        from_torch(tensor.dtype)
    except BadInputError as error:
        raise BadInputError(f"state: {name}: {error}") from error


def _find_ties(chunks: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, chunk in chunks.items():
        if chunk.numel():
            # Equal addresses aren't enough: views of one memory may still hold different values.
            view = (chunk.shape, chunk.stride(), chunk.dtype, chunk.is_conj(), chunk.is_neg())
            place = (chunk.device, chunk.data_ptr(), *view)
            groups.setdefault(place, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _copy(
    chunks: Mapping[str, torch.Tensor], ties: list[tuple[str, ...]], staging: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy every chunk into CPU memory; buffers of an earlier save are reused where they fit."""
    import torch

    # Tied names share a buffer as they share memory; what is no longer saved gives its buffer back.
    kept = {name: names[0] for names in ties for name in names}
    chosen = dict.fromkeys(kept.get(name, name) for name in chunks)
    for name in staging.keys() - chosen.keys():
        del staging[name]
    for name in chosen:
        buffer, chunk = staging.get(name), chunks[name]
        if buffer is None or buffer.shape != chunk.shape or buffer.dtype != chunk.dtype:
            staging[name] = torch.empty(chunk.shape, dtype=chunk.dtype)
    with ThreadPoolExecutor(COPY_THREADS, "snapshot") as pool:
        list(pool.map(lambda name: staging[name].copy_(chunks[name]), chosen))
    return {name: staging[kept.get(name, name)] for name in chunks}
