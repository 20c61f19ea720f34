"""Writing one checkpoint: every rank its chunks, rank 0 everything else.

[Note: order of writing] Chunk files -> ``.metadata`` -> manifest, all in a folder of a temporary name and each flushed;
then the rename to ``iter_*``, then the tracker, then retention. A process killed at any point leaves either a leftover
that nothing mistakes for a checkpoint, or a complete checkpoint with the tracker one save behind.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint._disk.build_folder import check_free_space, discard, publish, remove, remove_leftovers
from mm_checkpoint._disk.durable import FileRecord, durable_file, partial_path, replace_text
from mm_checkpoint._disk.files import await_shared
from mm_checkpoint._disk.iterations import TRACKER_NAME, complete_iterations, damage_of, iteration_name
from mm_checkpoint._disk.manifest import METADATA_NAME, make_manifest, write_manifest
from mm_checkpoint._formats.dcp_metadata import Extent
from mm_checkpoint._formats.dcp_writer import chunk_file_name, write_metadata, write_tensor
from mm_checkpoint._ranks import Ranks
from mm_checkpoint._run.snapshot import Contribution, Snapshot
from mm_checkpoint._tensors.source import as_stored
from mm_checkpoint.errors import BadInputError, DestinationError, sample

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

log = logging.getLogger(__name__)

Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Written:
    """What one rank wrote."""

    files: dict[str, FileRecord]
    extents: dict[Place, Extent]


@dataclass(frozen=True)
class WriteOptions:
    checksums: bool = True
    sync: bool = True


def write_checkpoint(
    folder: Path, step: int, snapshot: Snapshot, extra: Mapping[str, Any], ranks: Ranks, options: WriteOptions
) -> Path:
    """Write iteration ``step`` and move the tracker. Called on every rank; raises the same error on every rank.

    Raises:
        SaveError: the disk is full or refuses the write.
        DestinationError: ``folder`` is not the same for all ranks.
        ValueError: plain values differ between ranks.
    """
    target = folder / iteration_name(step)
    # Ranks agree on the name, not the path: one whose "same" folder is on another disk finds nothing there.
    partial = folder / ranks.together(lambda: _begin(target).name if ranks.is_first else "")[0]
    try:
        ranks.together(lambda: await_shared(partial))
        # Gather, plan, scatter, as DCP does: only a rank that sees all plans can drop the copies of replicated tensors.
        contributions = ranks.gather(ranks.each(snapshot.contribute))
        planned = ranks.each(lambda: _plan(folder, contributions) if ranks.is_first else None)
        plan = ranks.scatter(planned.plans if planned else None)
        own = ranks.each(lambda: _write_chunks(partial, plan, snapshot, ranks, options))
        written = ranks.gather(own)  # rank 0 goes on when every rank's chunks are flushed
        ranks.each(lambda: _finish(partial, target, planned, written, extra, options) if planned else None)
    except BaseException:
        if ranks.is_first:
            discard(partial)
        raise
    return target


def _begin(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    partial = partial_path(target)
    partial.mkdir()
    return partial


@dataclass(frozen=True)
class _Planned:
    plans: list[SavePlan]
    metadata: Metadata
    aliases: dict[str, str]


def _plan(folder: Path, contributions: list[Contribution]) -> _Planned:
    """Let torch's planner settle which rank writes what; tied names are written once."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    # torch keeps one rank's copy of a replicated value and drops the others without comparing them.
    _check_replicated(contributions)
    aliases = _agree_on_ties(contributions)
    plans = []
    for contribution in contributions:  # `_finish` adds the aliases back to .metadata, without bytes of their own
        items = [item for item in contribution.plan.items if item.index.fqn not in aliases]
        plans.append(dataclasses.replace(contribution.plan, items=items))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    global_plans, metadata = planner.create_global_plan(plans)
    # Readers rebuild the nesting from these paths; the states were flattened before torch saw them.
    metadata.planner_data = {name: path for part in contributions for name, path in part.paths.items()}
    size = sum(item.tensor_storage_size() or 0 for plan in global_plans for item in plan.items)
    check_free_space(folder, size)
    return _Planned(global_plans, metadata, aliases)


def _check_replicated(contributions: list[Contribution]) -> None:
    seen: dict[str, int] = {}
    different = {
        name
        for contribution in contributions
        for name, checksum in contribution.replicated.items()
        if seen.setdefault(name, checksum) != checksum
    }
    if different:
        raise ValueError(
            f"state: {len(different)} plain value(s) differ between ranks and only one would be kept: "
            f"{sample(different)}; put the rank into the name"
        )


def _agree_on_ties(contributions: list[Contribution]) -> dict[str, str]:
    """Names that are the same memory on every rank that holds any of it: alias to the name that is written."""
    aliases: dict[str, str] = {}
    groups = {names for contribution in contributions for names in contribution.ties}
    for names in sorted(groups, key=len):
        # A rank that holds no element of a tensor can't see what it is tied to, so it doesn't object.
        agreed = all(names in part.ties or part.empty.issuperset(names) for part in contributions)
        if agreed:
            kept = min(names, key=lambda name: (len(name), name))
            aliases |= {name: kept for name in names if name != kept}
    return aliases


def _write_chunks(partial: Path, plan: SavePlan, snapshot: Snapshot, ranks: Ranks, options: WriteOptions) -> _Written:
    if not plan.items:
        return _Written({}, {})
    name = chunk_file_name(ranks.rank)
    extents: dict[Place, Extent] = {}
    with durable_file(partial / name, checksum=options.checksums, sync=options.sync) as file:
        for item in plan.items:
            key = item.index.fqn
            if key in snapshot.values:
                start = file.tell()
                file.write(snapshot.values[key])
                extents[key, None] = Extent(name, start, file.tell() - start)
            else:
                assert item.tensor_data is not None  # it isn't a plain value
                chunk, box = snapshot.chunks[key], item.tensor_data.chunk
                if tuple(chunk.shape) != tuple(box.sizes):
                    raise BadInputError(f"state: {key} is sharded so that a rank holds no single box of it")
                extents[key, tuple(box.offsets)] = write_tensor(file, name, as_stored(chunk))
        return _Written({name: file.finish()}, extents)


def _finish(
    partial: Path,
    target: Path,
    planned: _Planned,
    written: list[_Written],
    extra: Mapping[str, Any],
    options: WriteOptions,
) -> None:
    files = {name: record for part in written for name, record in part.files.items()}
    extents = {place: extent for part in written for place, extent in part.extents.items()}
    metadata = planned.metadata
    for alias, kept in planned.aliases.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[kept]
        extents |= {(alias, offsets): extent for (name, offsets), extent in list(extents.items()) if name == kept}
    # Each file is written after those it describes: `.metadata` after the chunks, the manifest after everything.
    files[METADATA_NAME] = write_metadata(partial, metadata, extents, sync=options.sync)
    write_manifest(partial, make_manifest(files, extra), sync=options.sync)
    if target.exists():
        _set_aside(target)
    publish(partial, target, sync=options.sync)
    # The tracker moves last: until then it names the previous iteration, which is still complete.
    replace_text(target.parent / TRACKER_NAME, f"{extra['step']}\n", sync=options.sync)


def _set_aside(target: Path) -> None:
    """Make way for an iteration whose place a damaged older copy takes; a complete one is left alone."""
    damage = damage_of(target)
    if damage is None:
        raise DestinationError(f"{target}: appeared while this iteration was being written; it was left alone")
    aside = target.with_name(f"{target.name}.damaged-{secrets.token_hex(3)}")
    log.warning("%s is not complete (%s) and is renamed to %s", target, damage, aside.name)
    target.rename(aside)


def apply_retention(folder: Path, step: int, keep_last: int, keep_every: int | None) -> None:
    """Delete complete iterations up to ``step`` that neither rule keeps.

    Iterations beyond ``step`` are another run's and never touched, and the one just written always stays. A deletion
    that fails is only a warning: training should not stop for it.

    Args:
        folder: the run's folder.
        step: the iteration that was just written.
        keep_last: how many of the newest stay; -1 keeps all.
        keep_every: multiples of this number stay as well.
    """
    if keep_last == -1:
        return
    candidates = [(number, path) for number, path in complete_iterations(folder) if number <= step]
    doomed = [path for number, path in candidates[:-keep_last] if not (keep_every and number % keep_every == 0)]
    for path in doomed:
        # Renamed first, so that a deletion that is killed doesn't leave an iteration with files missing.
        leftover = partial_path(path)
        try:
            path.rename(leftover)
            remove(leftover)
        except OSError as error:
            log.warning("%s could not be deleted: %s", path, error)
        else:
            log.info("deleted %s (keep_last %s, keep_every %s)", path, keep_last, keep_every)
