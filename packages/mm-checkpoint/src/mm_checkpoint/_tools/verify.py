"""Checking what is on a disk: against its manifest if there is one, otherwise for consistency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mm_checkpoint._disk.durable import CHECKSUM
from mm_checkpoint._disk.files import read_json, safe_join
from mm_checkpoint._disk.iterations import TRACKER_NAME, list_iterations, read_tracker, tracked_path
from mm_checkpoint._disk.manifest import MANIFEST_NAME, METADATA_NAME, exported_parts, find_damage, read_manifest
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint._weights.sources import find_source
from mm_checkpoint.errors import BadInputError, SourceError


@dataclass
class Verification:
    """What `verify` found.

    Attributes:
        path: what was checked.
        checked: folders and files that were looked at.
        problems: one line each, naming the file; empty if all is well.
        notes: what could not be checked (no checksums recorded).
    """

    path: Path
    checked: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path, *, on_bytes: Callable[[int], None] | None = None) -> Verification:
    """Check a run, an iteration, a model folder, a pipeline folder or one weight file; reads every byte that has a
    checksum.

    Raises:
        SourceError: there is nothing to check.
    """
    result = Verification(Path(path))
    _verify_any(result, result.path, on_bytes)
    return result


def _verify_any(result: Verification, path: Path, on_bytes: Callable[[int], None] | None) -> None:
    if (path / MANIFEST_NAME).is_file():
        _verify_manifest(result, path, on_bytes)
    elif path.is_dir() and (list_iterations(path) or (path / TRACKER_NAME).exists()):
        _verify_run(result, path, on_bytes)
    elif (path / "model_index.json").is_file():
        index = path / "model_index.json"
        for name in [name for name, value in read_json(index).items() if isinstance(value, list)]:
            folder = safe_join(path, name, found_in=str(index))
            if (folder / MANIFEST_NAME).is_file() or (folder.is_dir() and _has_weights(folder)):
                _verify_any(result, folder, on_bytes)
    elif path.is_dir() and (parts := exported_parts(path)):
        for folder in parts:
            _verify_any(result, folder, on_bytes)
    else:
        _verify_structure(result, path)
        result.notes.append(f"{path}: no checksums are recorded, so only its structure was checked")


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in (".safetensors", ".bin", ".distcp") for file in folder.iterdir())


def _verify_manifest(result: Verification, path: Path, on_bytes: Callable[[int], None] | None) -> None:
    try:
        damage = find_damage(path, checksums=True, on_bytes=on_bytes)
        unhashed = [name for name, value in read_manifest(path)["files"].items() if value.get(CHECKSUM) is None]
    except BadInputError as error:
        damage, unhashed = [str(error)], []
    result.problems += damage
    if unhashed:
        result.notes.append(f"{path}: written without checksums, so only sizes and structure were checked")
    if damage:
        result.checked.append(path)
    else:
        _verify_structure(result, path)


def _verify_structure(result: Verification, path: Path) -> None:
    result.checked.append(path)
    try:
        if (path / METADATA_NAME).exists():
            source = DcpSource(path)
            source.check_items()
            source.close()
        else:
            find_source(path).open().close()
    except SourceError:
        if not result.problems and len(result.checked) == 1:
            raise
        result.problems.append(f"{path}: no weights in it")
    except BadInputError as error:
        result.problems.append(str(error))


def _verify_run(result: Verification, path: Path, on_bytes: Callable[[int], None] | None) -> None:
    for _, iteration in list_iterations(path):
        if (iteration / MANIFEST_NAME).is_file() or (iteration / METADATA_NAME).is_file():
            _verify_any(result, iteration, on_bytes)
        else:
            result.problems.append(f"{iteration}: neither manifest nor .metadata: what is left of an interrupted save")
    try:
        tracked = read_tracker(path)
        if tracked is None:
            result.notes.append(f"{path}: no tracker")
        else:
            tracked_path(path, tracked, must_exist=True)
    except BadInputError as error:
        result.problems.append(str(error))
