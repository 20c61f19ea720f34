"""The manifest: what makes a checkpoint complete, checkable and exportable."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.durable import FileRecord, checksum_file, write_bytes
from mm_checkpoint._disk.files import dump_json, read_json, safe_join
from mm_checkpoint.errors import CorruptFileError, IncompleteCheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "mm-checkpoint"
FORMAT_VERSION = 1
SEAL = "manifest_crc32"


def make_manifest(files: Mapping[str, FileRecord], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's content: our fields first, then the caller's.

    Raises:
        ValueError: ``extra`` uses one of our fields.
    """
    ours = {"format": FORMAT, "format_version": FORMAT_VERSION}
    clash = {"files", SEAL, *ours} & extra.keys()
    if clash:
        raise ValueError(f"manifest: {', '.join(sorted(clash))} can't be given, they are filled in when saving")
    return {**ours, **extra, "files": {name: files[name].to_json() for name in sorted(files)}}


def write_manifest(folder: Path, manifest: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write the manifest of a folder whose other files are all there."""
    write_bytes(folder / MANIFEST_NAME, dump_json(_sealed(manifest)), sync=sync)


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the checksum of its own content at the end."""
    content = {key: value for key, value in manifest.items() if key != SEAL}
    return {**content, SEAL: f"{zlib.crc32(dump_json(content)):08x}"}


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        IncompleteCheckpointError: there is none.
        CorruptFileError: it isn't one of ours, is unreadable, or comes from a newer version of this format.
    """
    file = Path(path) / MANIFEST_NAME
    if not file.is_file():
        raise IncompleteCheckpointError(f"{path}: no {MANIFEST_NAME}, so this is no complete checkpoint")
    manifest = read_json(file)
    # Compared as text, so that every changed byte shows, white space included.
    if file.read_bytes() != dump_json(_sealed(manifest)):
        raise CorruptFileError(f"{file}: has changed since it was written (checksum)")
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
        raise CorruptFileError(f"{file}: not a manifest of {FORMAT}")
    if not isinstance(manifest["format_version"], int) or manifest["format_version"] > FORMAT_VERSION:
        raise CorruptFileError(
            f"{file}: format version {manifest['format_version']}, this release reads up to {FORMAT_VERSION}"
        )
    return manifest


def find_damage(folder: Path, *, checksums: bool = False, on_bytes: Any = None) -> list[str]:
    """Where a folder falls short of its manifest: one line per file, none if it is whole.

    Args:
        folder: a folder with a manifest.
        checksums: also read every byte; otherwise only presence and sizes are checked, which is cheap enough for
            every start.
        on_bytes: called with the number of bytes read, piece by piece.
    """
    found = []
    for name, value in read_manifest(folder)["files"].items():
        file = safe_join(folder, name, found_in=MANIFEST_NAME)
        expected = FileRecord.from_json(value)
        if not file.is_file():
            found.append(f"{file}: missing")
        elif file.stat().st_size != expected.size:
            found.append(f"{file}: {file.stat().st_size:,} bytes, {expected.size:,} were written")
        elif checksums and expected.checksum and checksum_file(file, on_bytes).checksum != expected.checksum:
            found.append(f"{file}: its bytes have changed since they were written (checksum)")
    return found


def exported_parts(path: Path) -> list[Path]:
    """The model folders inside ``path`` if it isn't one itself: what an export without a pipeline leaves."""
    if any(child.is_file() for child in path.iterdir()):
        return []
    return sorted(child for child in path.iterdir() if (child / MANIFEST_NAME).is_file())


METADATA_NAME = ".metadata"
