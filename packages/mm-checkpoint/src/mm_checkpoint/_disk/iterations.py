"""Finding iterations: names, numeric order, the tracker, what counts as complete."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mm_checkpoint._disk.manifest import MANIFEST_NAME, METADATA_NAME, find_damage
from mm_checkpoint.errors import BadInputError, CorruptFileError, IncompleteCheckpointError, SourceError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d+)")
log = logging.getLogger(__name__)


def iteration_name(step: int) -> str:
    """``iter_0000120``."""
    return f"iter_{step:07d}"


def iteration_number(path: Path) -> int | None:
    """120 for a folder named ``iter_0000120``; None for other names."""
    match = _ITERATION.fullmatch(path.name)
    return int(match[1]) if match else None


def list_iterations(folder: Path) -> list[tuple[int, Path]]:
    """Every ``iter_*`` folder with its number, in numeric order, complete or not.

    Raises:
        IncompleteCheckpointError: two folders with one number (``iter_9`` and ``iter_0000009``).
    """
    found: dict[int, Path] = {}
    if not folder.is_dir():
        return []
    for path in sorted(folder.iterdir()):
        step = iteration_number(path)
        if step is not None and path.is_dir():
            if step in found:
                raise IncompleteCheckpointError(f"{folder}: {found[step].name} and {path.name} are the same iteration")
            found[step] = path
    return sorted(found.items())


def damage_of(iteration: Path) -> str | None:
    """Why an iteration is not complete, in one line; None if it is."""
    try:
        damage = find_damage(iteration)
    except BadInputError as error:
        return str(error)
    return damage[0] if damage else None


def complete_iterations(folder: Path) -> list[tuple[int, Path]]:
    """The complete iterations, in numeric order."""
    return [(step, path) for step, path in list_iterations(folder) if damage_of(path) is None]


def newest_complete(folder: Path) -> Path | None:
    """The complete iteration with the highest number; None if ``folder`` holds no iteration at all.

    Newer ones that are damaged are skipped with a warning.

    Raises:
        IncompleteCheckpointError: there are iterations, but not one of them is complete.
    """
    # By number, not by the tracker: a killed save can leave the tracker one iteration behind.
    iterations = list_iterations(folder)
    for _, path in reversed(iterations):
        damage = damage_of(path)
        if damage is None:
            return path
        log.warning("%s is not complete and is skipped: %s", path, damage)
    if iterations:
        names = ", ".join(path.name for _, path in iterations[-5:])
        raise IncompleteCheckpointError(f"{folder}: none of its iterations ({names}) is complete")
    return None


def read_tracker(folder: Path) -> str | None:
    """The tracker's text (a number, or ``release``); None if there is no tracker.

    Raises:
        CorruptFileError: it holds something else.
    """
    try:
        text = (folder / TRACKER_NAME).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if text != RELEASE and not text.isdigit():
        raise CorruptFileError(f"{folder / TRACKER_NAME}: holds {text[:40]!r}, expected an iteration number")
    return text


def resolve_iteration(path: Path) -> Path:
    """The iteration that ``path`` stands for: a run's folder, or an iteration's own.

    Raises:
        IncompleteCheckpointError: it is damaged or absent (the message names the newest complete one), or there is no
            tracker and several are complete.
    """
    if not path.is_dir():
        raise IncompleteCheckpointError(f"{path}: no such folder")
    if (path / MANIFEST_NAME).is_file() or (path / METADATA_NAME).is_file() or _ITERATION.fullmatch(path.name):
        return require_complete(path)
    tracked = read_tracker(path)
    if tracked is not None:
        return require_complete(tracked_path(path, tracked))
    complete = complete_iterations(path)
    if len(complete) == 1:
        return complete[0][1]
    if not complete:
        raise IncompleteCheckpointError(f"{path}: no complete checkpoint in it (no tracker, no complete iter_*)")
    names = ", ".join(found.name for _, found in complete)
    raise IncompleteCheckpointError(f"{path}: no tracker, and several complete iterations: {names}; name one of them")


def require_complete(iteration: Path) -> Path:
    """``iteration`` itself, if it is complete.

    Raises:
        IncompleteCheckpointError: it isn't; the message names the file, and the newest older one that is complete.
    """
    damage = damage_of(iteration) if iteration.is_dir() else f"{iteration}: no such folder"
    if damage is None:
        return iteration
    limit = iteration_number(iteration)
    older = [path for step, path in complete_iterations(iteration.parent) if limit is None or step < limit]
    hint = f"the newest older complete one is {older[-1]}" if older else "there is no older complete one"
    raise IncompleteCheckpointError(f"{iteration.name} is not complete: {damage}; {hint}")


def tracked_path(folder: Path, tracked: str, *, must_exist: bool = False) -> Path:
    """The folder that a tracker's text refers to.

    Raises:
        IncompleteCheckpointError: ``must_exist``, and it doesn't.
    """
    if tracked == RELEASE:
        path = folder / RELEASE
    else:
        path = dict(list_iterations(folder)).get(int(tracked), folder / iteration_name(int(tracked)))
    if must_exist and not path.is_dir():
        raise IncompleteCheckpointError(f"{folder / TRACKER_NAME}: names {tracked}, but {path.name} is not there")
    return path


def find_weights_iteration(path: Path) -> Path:
    """The folder with ``.metadata`` that a weight source stands for: ``path`` itself, or an iteration inside it.

    No manifest is needed, so that folders written by torch alone are found too.

    Raises:
        SourceError: there is none, or there are several and no tracker.
    """
    if (path / METADATA_NAME).is_file():
        return path
    tracked = read_tracker(path)
    if tracked is not None and (tracked_path(path, tracked) / METADATA_NAME).is_file():
        return tracked_path(path, tracked)
    candidates = [found for _, found in list_iterations(path)] + [path / RELEASE]
    candidates = [found for found in candidates if (found / METADATA_NAME).is_file()]
    if tracked is not None or not candidates:
        named = f"its tracker names {tracked}, but " if tracked is not None else ""
        raise SourceError(f"{path}: {named}there is no such iteration with a {METADATA_NAME}")
    if len(candidates) > 1:
        names = ", ".join(found.name for found in candidates)
        raise SourceError(f"{path}: no tracker, and several iterations: {names}; name one of them")
    return candidates[0]
