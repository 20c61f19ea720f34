"""Saving, finding and resuming the checkpoints of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mm_checkpoint._disk.build_folder import check_free_space
from mm_checkpoint._disk.durable import partial_path, write_bytes
from mm_checkpoint._disk.files import await_shared
from mm_checkpoint._disk.iterations import (
    complete_iterations,
    iteration_name,
    iteration_number,
    newest_complete,
    require_complete,
    resolve_iteration,
)
from mm_checkpoint._disk.manifest import make_manifest
from mm_checkpoint._ranks import Ranks
from mm_checkpoint._run.restore import checkpoint_identity, restore
from mm_checkpoint._run.save import WriteOptions, apply_retention, write_checkpoint
from mm_checkpoint._run.snapshot import Snapshot, take_snapshot
from mm_checkpoint.errors import DestinationError

if TYPE_CHECKING:
    import torch


class CheckpointManager:
    """The checkpoints in one folder: ``<folder>/iter_0000120/`` and the tracker beside it.

    Call every method that writes or reads tensors (`prepare`, `save`, `wait`, `load`, `close`) on all ranks; an error
    is raised on all of them. Without a process group, the one process is all ranks.

    Args:
        folder: on a disk that all ranks share; created by `prepare` or the first save.
        keep_last: how many of the newest iterations stay; -1 keeps all.
        keep_every: iterations that are multiples of this stay as well.
        async_save: `save` returns as soon as the state is copied, and the copy is written in the background. The copies
            are kept for the next save, so a rank holds its part of the state twice.
        checksums: hash the files while writing.
        sync: flush to the disk before the tracker moves. Switch it off only for measurements.

    Raises:
        ValueError: ``keep_last`` is 0 or below -1, or ``keep_every`` is not positive.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        async_save: bool = False,
        checksums: bool = True,
        sync: bool = True,
    ) -> None:
        if keep_last < -1 or keep_last == 0:
            raise ValueError(
                f"keep_last: {keep_last} would delete what was just saved; use -1 (keep all) or at least 1"
            )
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every: {keep_every} is not a positive number of steps")
        self.folder = Path(folder)
        self._keep = (keep_last, keep_every)
        self._options = WriteOptions(checksums, sync)
        self._staging: dict[str, torch.Tensor] | None = {} if async_save else None
        self._executor = ThreadPoolExecutor(1, "mm-checkpoint") if async_save else None
        self._pending: Future[Path] | None = None
        self._ranks: Ranks | None = None
        self._known: set[int] = set()  # iterations that this run wrote or resumed from

    def prepare(self, step: int = 0, state: Mapping[str, Any] | None = None) -> None:
        """Check, before any step is trained, that saving will work: call it right after a resume or a fresh start.

        Args:
            step: where the run starts; a complete iteration beyond it belongs to another run.
            state: what will be saved, to check that it fits on the disk and, with ``async_save``, to allocate the
                buffers that the first save would otherwise wait for.

        Raises:
            DestinationError: the folder holds iterations beyond ``step``, or isn't shared by all ranks.
            SaveError: the disk is too full, or can't be written.
        """
        self.wait()
        ranks = self._peers()
        # Seeing a file with a name that only rank 0 knows proves that a rank shares rank 0's disk.
        probe = self.folder / ranks.together(lambda: self._make_probe(step) if ranks.is_first else "")[0]
        try:
            ranks.together(lambda: await_shared(probe))
            if state is not None:
                sizes = ranks.all_gather(_own_bytes(state))
                ranks.together(lambda: check_free_space(self.folder, sum(sizes)) if ranks.is_first else None)
                if self._staging is not None:
                    ranks.each(lambda: take_snapshot(state, is_first=ranks.is_first, staging=self._staging))
        finally:
            if ranks.is_first:
                probe.unlink(missing_ok=True)
        if step > 0:
            self._known.add(step)

    def save(self, step: int, state: Mapping[str, Any], *, manifest: Mapping[str, Any] | None = None) -> Path:
        """Save ``state`` as iteration ``step``; an error from an earlier background save is raised here first.

        Args:
            step: the iteration's number.
            state: nested mappings of tensors (plain or DTensor) and plain values. A plain value is the same on all
                ranks, or its name has the rank in it.
            manifest: further fields for the manifest (json values).

        Returns:
            The iteration's folder; with ``async_save`` it is complete only after `wait`.

        Raises:
            DestinationError: the folder holds this iteration already, or a later one that this run didn't write, or it
                isn't shared by all ranks.
            SaveError: the disk is full or refuses the write; what was complete before still is.
            TypeError, ValueError: a value that can't be stored, or that differs between ranks.
        """
        self.wait()
        ranks = self._peers()
        extra = {"step": step, "created": datetime.now(UTC).isoformat(timespec="seconds"), "world_size": ranks.size}
        extra |= manifest or {}

        def begin() -> Snapshot:
            _check_manifest(step, extra)
            if ranks.is_first:
                self._check_foreign(step, inclusive=True)
                if step in dict(complete_iterations(self.folder)):
                    raise DestinationError(f"{self.folder / iteration_name(step)}: already saved")
            return take_snapshot(state, is_first=ranks.is_first, staging=self._staging)

        # On all ranks together, even for a background save: one that fails here must not leave its peers waiting.
        snapshot = ranks.each(begin)
        if self._executor is None:
            return self._write(step, snapshot, extra)
        self._pending = self._executor.submit(self._write, step, snapshot, extra)
        return self.folder / iteration_name(step)

    def _write(self, step: int, snapshot: Snapshot, extra: Mapping[str, Any]) -> Path:
        ranks = self._peers()
        path = write_checkpoint(self.folder, step, snapshot, extra, ranks, self._options)
        self._known.add(step)
        if ranks.is_first:  # only now: the new iteration and the tracker are on the disk
            apply_retention(self.folder, step, *self._keep)
        return path

    def _check_foreign(self, step: int, *, inclusive: bool) -> None:
        foreign = [
            path.name
            for number, path in complete_iterations(self.folder)
            if number not in self._known and (number >= step if inclusive else number > step)
        ]
        if foreign:
            raise DestinationError(
                f"{self.folder}: holds {', '.join(foreign[-3:])}, which this run did not write and which would be "
                f"taken for newer than step {step}: save elsewhere, or resume from there (load auto)"
            )

    def _make_probe(self, step: int) -> str:
        self._check_foreign(step, inclusive=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = partial_path(self.folder / "probe")
        write_bytes(probe, b"", sync=False)
        return probe.name

    def latest(self) -> Path | None:
        """The complete iteration with the highest number; None if there is no iteration. Waits for a pending save.

        Called on all ranks, like every method: rank 0 decides.

        Raises:
            IncompleteCheckpointError: there are iterations, but none is complete.
        """
        self.wait()
        return self._found_by_first(lambda: newest_complete(self.folder))

    def resolve(self, load: str | Path) -> Path | None:
        """The iteration that ``load`` stands for.

        ``auto`` is `latest` of this folder. Anything else is a run's folder (its tracked iteration, or without a
        tracker the only complete one) or an iteration's.

        Raises:
            IncompleteCheckpointError: no complete iteration, or several; for a damaged one the message names the newest
                older one that is complete.
        """
        if str(load) == "auto":
            return self.latest()
        self.wait()
        return self._found_by_first(lambda: resolve_iteration(Path(load)))

    def _found_by_first(self, find: Callable[[], Path | None]) -> Path | None:
        """Rank 0 looks and tells the others; their view of a shared disk may lag, so they wait until they see it."""
        ranks = self._peers()
        path = ranks.together(lambda: find() if ranks.is_first else None)[0]
        if path is not None:
            ranks.together(lambda: await_shared(path))
        return path

    def load(self, path: str | Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of ``state`` in place from a complete iteration, and return its plain values.

        Any number of ranks, any mesh: each rank reads the bytes of its own shards. Names are compared both ways in
        every section (top-level key) that ``state`` has; a section it lacks is not loaded; a section that is None is
        returned whole, its tensors included.

        Raises:
            IncompleteCheckpointError, CorruptFileError: files are missing, truncated or unreadable.
            WeightMismatchError: names, shapes, element types or kinds differ.
        """
        self.wait()
        path, ranks = Path(path), self._peers()
        # Node-local disks may each hold a complete iteration of this name, so ranks compare what they see in it.
        seen = ranks.together(lambda: checkpoint_identity(require_complete(path)))
        if len(set(seen)) > 1:
            raise DestinationError(f"{path}: the ranks see different checkpoints there; it has to be on a shared disk")
        values = ranks.each(lambda: restore(path, state))
        step = iteration_number(path)
        if step is not None and path.resolve().parent == self.folder.resolve():
            self._known.add(step)
        return values

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error, if it failed."""
        pending, self._pending = self._pending, None  # cleared first: an error is raised once, not at every later call
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """`wait`, then release threads and buffers. The manager can't be used afterwards."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def _peers(self) -> Ranks:
        if self._ranks is None:
            # A group of its own: collectives of a background save must not mix with those of the training.
            self._ranks = Ranks.current(own_group=True)
        return self._ranks


def _check_manifest(step: int, extra: Mapping[str, Any]) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"step: {step!r} is not a number of steps")
    if extra["step"] != step:
        raise ValueError(f"manifest: step {extra['step']} given while saving step {step}")
    try:
        json.dumps(make_manifest({}, extra))
    except TypeError as error:
        raise TypeError(f"manifest: {error}") from error


def _own_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors that this rank holds, replicas counted on every rank: an upper bound on what it writes."""
    from mm_checkpoint._run.state import flatten
    from mm_checkpoint._tensors.shards import local_part

    return sum(local_part(tensor).tensor.nbytes for tensor in flatten(state).tensors.values())
