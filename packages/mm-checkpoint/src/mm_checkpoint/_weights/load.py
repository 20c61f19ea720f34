"""Streaming weights from a source straight into a module's tensors, each rank only its own shard."""

from __future__ import annotations

import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mm_checkpoint._formats.safetensors import stream_pieces
from mm_checkpoint._ranks import Ranks
from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.dtypes import from_torch, kind, to_torch
from mm_checkpoint._tensors.shards import fill, local_part
from mm_checkpoint._tensors.source import PIECE_BYTES, TensorInfo, TensorSource, bytes_of
from mm_checkpoint._weights.conversion_cache import converted
from mm_checkpoint._weights.naming import Wanted, choose_reading, compact_dtypes
from mm_checkpoint._weights.sources import WeightSource, find_source
from mm_checkpoint.errors import BadInputError, CheckpointError, WeightMismatchError, nearest, sample
from mm_checkpoint.key_map import KeyMap, get_key_map

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
        source: where from, in words.
        naming: how the file's names were read, in words.
        loaded: number of names filled, without ties that share a filled tensor.
        bytes_read: bytes of tensor data this rank asked the files for.
        casts: ``"float32 -> bfloat16"`` to the number of tensors cast that way.
        ties: names the file lacks, to the loaded name of the same tensor.
        missing: allowed names that the file lacks; their tensors are unchanged.
        dropped: names in the file that were left out (by the key map, or because the module recomputes them).
        source_dtypes: element types in the file by the module's names, the most common one as ``*``. Hand it to
            `CheckpointManager.save` as ``sub_models.<name>.source_dtypes``, so that an export restores them.
        seconds: wall time.
    """

    source: str
    naming: str
    loaded: int
    bytes_read: int
    casts: dict[str, int] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    source_dtypes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def summary(self) -> str:
        """One line for logs; names only where something unusual happened."""
        parts = [f"{self.loaded} tensors from {self.source} ({self.naming})"]
        parts.append(f"{self.bytes_read / 1e6:,.1f} MB in {self.seconds:.1f} s")
        parts += [f"{count} cast {cast}" for cast, count in self.casts.items()]
        parts += [f"{len(self.ties)} tied"] if self.ties else []
        parts += [f"left as they were: {sample(self.missing)}"] if self.missing else []
        parts += [f"not used: {sample(self.dropped)}"] if self.dropped else []
        return ", ".join(parts)


def load_weights(
    module: nn.Module,
    source: WeightSource | str | Path,
    *,
    key_map: KeyMap | str | None = None,
    allow_missing: Sequence[str] = (),
    prefix: str | None = None,
    broadcast_from_rank0: bool | None = None,
) -> LoadReport:
    """Fill every persistent parameter and buffer of ``module`` from ``source``.

    Plain tensors and DTensors on any mesh and device are filled in place; each rank reads the bytes of its own shard
    and nothing else. Values are cast to the module's element type where it differs, and every such cast is reported; a
    cast never crosses kinds (floating, integer, ...). A tied name that the file lacks is fine if another name of the
    same tensor is there.

    Args:
        module: materialised (no meta tensors), wrapped or not.
        source: what `resolve_source` returned, or a path.
        key_map: from the file's names to the module's, used where the file's names need it.
        allow_missing: names or ``*`` patterns that the file may lack; those of ``source`` are added.
        prefix: take only the file's names that start with it, and strip it. By default, known prefixes are tried.
        broadcast_from_rank0: rank 0 alone reads, and sends to the others (all ranks have to call); by default as the
            source says.

    Raises:
        WeightMismatchError: names or shapes differ; one message with counts, names, nearest matches and the file.
        SourceError, CorruptFileError, KeyMapError: the source can't be read or mapped.
        BadInputError: meta tensors in ``module``, or an ``allow_missing`` entry that matches nothing.
    """
    start = time.perf_counter()
    if not isinstance(source, WeightSource):
        source = find_source(Path(source))
    key_map = get_key_map(key_map) if isinstance(key_map, str) else key_map
    targets = _targets(module)
    wanted = _wanted(module, targets, (*allow_missing, *source.allow_missing))
    broadcast = source.broadcast_from_rank0 if broadcast_from_rank0 is None else broadcast_from_rank0
    # Without broadcast, each process is alone as far as this goes: it opens, checks and reads without a collective.
    ranks = Ranks.current() if broadcast else Ranks()
    opened: list[TensorSource] = []

    def plan() -> _Plan | None:
        if not ranks.is_first:
            return None
        tensors, made = _open(source, targets, wanted, key_map, prefix)
        opened.append(tensors)
        return made

    try:
        agreed = ranks.together(plan)[0]  # an error of rank 0 is raised on all, none of which has filled anything
        assert agreed is not None
        if ranks.size > 1:
            _fill_by_broadcast(opened[0] if opened else None, agreed, targets, ranks)
        else:
            for name in agreed.names:
                fill(local_part(targets[name]), opened[0], name)
        bytes_read = opened[0].bytes_read if opened else 0
    finally:
        for tensors in opened:
            tensors.close()
    report = _report(source, agreed, targets, wanted, bytes_read, time.perf_counter() - start)
    log.info("%s", report.summary())
    return report


@dataclass(frozen=True)
class _Plan:
    """How a file's names are read: what every rank needs to know about it."""

    naming: str
    dropped: tuple[str, ...]
    infos: dict[str, TensorInfo]
    names: tuple[str, ...]


def _open(
    source: WeightSource,
    targets: Mapping[str, torch.Tensor],
    wanted: Wanted,
    key_map: KeyMap | None,
    prefix: str | None,
) -> tuple[TensorSource, _Plan]:
    """Open the source (converted, if it asks for that) under the module's names, and check that it fits."""
    found = converted(source)
    tensors = found.open()
    try:
        reading = choose_reading(
            tensors, wanted, form=found.format, key_map=key_map, prefix=prefix, origin=str(found.path)
        )
        infos = dict(reading.source.tensors)
        _check_casts(infos, targets, found.path)
        return reading.source, _Plan(str(reading.naming), reading.dropped, infos, _distinct(reading.source, wanted))
    except BaseException:
        tensors.close()
        raise


def _targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every persistent parameter and buffer by name, tied ones under each of their names."""
    import torch

    state = module.state_dict(keep_vars=True)  # the tensors themselves: `_wanted` tells ties by identity
    targets = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    on_meta = [name for name, value in targets.items() if value.is_meta]
    if on_meta:
        raise BadInputError(
            f"{len(on_meta)} of {len(targets)} tensors are on meta: {sample(on_meta)}; materialise the module first"
        )
    return targets


def _wanted(module: nn.Module, targets: Mapping[str, torch.Tensor], allow_missing: Collection[str]) -> Wanted:
    groups: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        groups.setdefault(id(tensor), []).append(name)
    optional: set[str] = set()
    for pattern in allow_missing:
        hits = fnmatch.filter(targets, pattern)
        if not hits:
            hint = nearest(pattern, targets, 3)
            guess = f"; nearest: {', '.join(hint)}" if hint else ""
            raise BadInputError(f"allow_missing: {pattern!r} matches no parameter or buffer{guess}")
        optional.update(hits)
    return Wanted(
        shapes={name: tuple(tensor.shape) for name, tensor in targets.items()},
        ties={name: tuple(groups[id(tensor)]) for name, tensor in targets.items()},
        optional=optional,
        ignorable={name for name, _ in module.named_buffers()} - targets.keys(),
    )


def _check_casts(infos: Mapping[str, TensorInfo], targets: Mapping[str, torch.Tensor], origin: Path) -> None:
    for name, info in infos.items():  # before anything is filled: a failure later would leave the module half loaded
        wanted = from_torch(targets[name].dtype)
        if kind(info.dtype) != kind(wanted):
            raise WeightMismatchError(f"{origin}: {name} is {info.dtype}, which can't be cast to the module's {wanted}")


def _distinct(source: TensorSource, wanted: Wanted) -> tuple[str, ...]:
    """One name per tensor; two names of a tied tensor must hold the same values."""
    # Filling both names of a tie would read twice, and the last one read would win silently.
    names: list[str] = []
    done: dict[tuple[str, ...], str] = {}
    for name in source.tensors:
        first = done.setdefault(wanted.ties[name], name)
        if first == name:
            names.append(name)
        elif not _equal(source, first, name):
            raise WeightMismatchError(f"{source.path}: {first} and {name} are one tensor here, but differ in the file")
    return tuple(names)


def _equal(source: TensorSource, first: str, second: str) -> bool:
    """Whether two stored tensors hold the same bytes; they are read only if they don't share their storage."""
    one, two = source.tensors[first], source.tensors[second]
    if one.storage is not None and one.storage == two.storage:
        return True
    if one.dtype != two.dtype:
        return False
    pairs = zip(stream_pieces(source, first, one.dtype), stream_pieces(source, second, two.dtype), strict=True)
    return all(bytes_of(a) == bytes_of(b) for a, b in pairs)


def _report(
    source: WeightSource,
    plan: _Plan,
    targets: Mapping[str, torch.Tensor],
    wanted: Wanted,
    bytes_read: int,
    seconds: float,
) -> LoadReport:
    casts = Counter(
        f"{info.dtype} -> {from_torch(targets[name].dtype)}"
        for name, info in plan.infos.items()
        if info.dtype != from_torch(targets[name].dtype)
    )
    absent = [name for name in wanted.shapes if name not in plan.infos]
    partners = {name: [tied for tied in wanted.ties[name] if tied in plan.infos] for name in absent}
    return LoadReport(
        source=source.describe(),
        naming=plan.naming,
        loaded=len(plan.names),
        bytes_read=bytes_read,
        casts=dict(casts),
        ties={name: found[0] for name, found in partners.items() if found},
        missing=tuple(name for name, found in partners.items() if not found),
        dropped=plan.dropped,
        source_dtypes=compact_dtypes(plan.infos),
        seconds=seconds,
    )


def _fill_by_broadcast(
    source: TensorSource | None, plan: _Plan, targets: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Rank 0 reads whole tensors piece by piece; every rank keeps what belongs to its shard.

    The last byte of every message says whether the read failed, so that no rank waits for bytes that won't come. Whole
    tensors go out, not shards: one broadcast serves all ranks, whatever the mesh, and memory is bounded by a piece.
    """
    import torch
    import torch.distributed as dist

    for name in plan.names:
        info, part = plan.infos[name], local_part(targets[name])
        stored = to_torch(info.dtype)
        for box in Box.full(info.shape).pieces(PIECE_BYTES // stored.itemsize):
            length = box.numel * stored.itemsize
            message = torch.zeros(length + 1, dtype=torch.uint8)  # as bytes: gloo doesn't know every element type
            piece = message[:length].view(stored).reshape(box.sizes)
            failure: CheckpointError | None = None
            if source is not None:
                try:
                    source.read_into(name, box, piece)
                except CheckpointError as error:
                    failure, message[length] = error, 1
            dist.broadcast(message, src=0, group=ranks.group)
            if message[length]:
                raise failure or CheckpointError(f"rank 0 could not read {name}; its own message says why")
            # Every rank receives every piece, but casts only what it keeps.
            common = box.intersect(part.box) if box.sizes else box
            if common is not None and part.tensor.numel():
                target = part.tensor[common.relative_to(part.box.offsets).slices]
                target.copy_(piece[common.relative_to(box.offsets).slices])
