"""Filling a training state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint._disk.iterations import require_complete
from mm_checkpoint._disk.manifest import read_manifest
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint._run.state import FlatState, flatten, unflatten
from mm_checkpoint._tensors.dtypes import from_torch
from mm_checkpoint._tensors.shards import fill, local_part
from mm_checkpoint._tensors.source import read_box
from mm_checkpoint.errors import BadInputError, WeightMismatchError, nearest, sample

if TYPE_CHECKING:
    import torch


def restore(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """See `CheckpointManager.load`; this is one rank's part, without communication."""
    require_complete(path)  # by sizes and the manifest's own checksum; hashing whole files is `verify`'s job
    source = DcpSource(path)
    try:
        whole = [section for section, content in state.items() if content is None]
        flat = flatten({section: content for section, content in state.items() if content is not None})
        # Everything is compared before anything is filled: a mismatch leaves the state as it was.
        _check_names(source, flat, state)
        _check_tensors(source, flat.tensors)
        for name, tensor in flat.tensors.items():
            fill(local_part(tensor), source, name)
        found = {name: source.read_value(name) for name in flat.values}
        for section in whole:  # nothing to fill in place, so its tensors are new ones on the CPU
            found |= {name: source.read_value(name) for name in source.metadata.values if _in(section, name)}
            found |= {name: read_box(source, name) for name in source.tensors if _in(section, name)}
        return unflatten(found, source.metadata.paths)
    finally:
        source.close()


def checkpoint_identity(path: Path) -> str:
    """A text that is equal on all ranks that see the same checkpoint."""
    manifest = read_manifest(path)
    return f"{path.name} {manifest['files']}"


def _in(section: str, name: str) -> bool:
    return name == section or name.startswith(section + ".")


def _check_names(source: DcpSource, flat: FlatState, state: Mapping[str, Any]) -> None:
    # Both ways: torch's own loader ignores a surplus name silently.
    stored = source.tensors.keys() | source.metadata.values.keys()
    wanted = flat.tensors.keys() | flat.values.keys()
    missing = wanted - stored
    compared = [section for section, content in state.items() if content is not None]
    surplus = {name for name in stored - wanted if any(_in(section, name) for section in compared)}
    empty = [
        section for section, content in state.items() if content is None and not any(_in(section, n) for n in stored)
    ]
    if missing or surplus or empty:
        lines = [
            f"{source.path}: {len(missing)} name(s) missing in the checkpoint, {len(surplus)} not in the state to fill"
        ]
        lines += [f"no section {section!r} in it" for section in empty]
        lines += [f"missing: {sample(missing)}"] if missing else []
        hints = [(name, nearest(name, surplus, 1)) for name in sorted(missing)[:3]]
        lines += [f"  nearest to {name}: {hint[0]}" for name, hint in hints if hint]
        lines += [f"not in the state: {sample(surplus)}"] if surplus else []
        raise WeightMismatchError("\n  ".join(lines))
    kinds = [name for name in flat.tensors if name not in source.tensors] + [
        n for n in flat.values if n in source.tensors
    ]
    if kinds:
        raise WeightMismatchError(f"{source.path}: tensors on one side, plain values on the other: {sample(kinds)}")


def _check_tensors(source: DcpSource, tensors: Mapping[str, torch.Tensor]) -> None:
    # Weights may be cast when loaded; a resumed state may not, since it has to go on with the same bits.
    wrong = []
    for name, tensor in tensors.items():
        info, dtype = source.tensors[name], from_torch(tensor.dtype)
        if info.shape != tuple(tensor.shape) or info.dtype != dtype:
            wrong.append(f"{name} is {list(info.shape)} {info.dtype}, wanted {list(tensor.shape)} {dtype}")
    if wrong:
        raise WeightMismatchError(f"{source.path}: {len(wrong)} tensor(s) differ: {'; '.join(sorted(wrong)[:5])}")
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise BadInputError(f"{len(meta)} tensor(s) to fill are on meta: {sample(meta)}")
