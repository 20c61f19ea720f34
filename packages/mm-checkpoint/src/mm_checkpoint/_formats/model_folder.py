"""Writing a model's folder: weight files under a size limit, index, manifest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.durable import FileRecord, write_bytes
from mm_checkpoint._disk.files import dump_json
from mm_checkpoint._disk.manifest import make_manifest, write_manifest
from mm_checkpoint._formats.safetensors import write_file
from mm_checkpoint._tensors.dtypes import is_floating, itemsize
from mm_checkpoint._tensors.mapped import rename
from mm_checkpoint._tensors.source import TensorSource
from mm_checkpoint.errors import BadInputError

DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str | int) -> int:
    """Bytes of ``5GB``, ``500MiB`` or a plain number.

    Raises:
        BadInputError: it isn't a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise BadInputError(f"size: {text!r} is not a number of bytes such as 5GB, 500MiB or 1000000")
    return int(float(match[1]) * unit)


def stem_of(config: Mapping[str, Any] | None) -> str:
    """What the weight files beside this ``config.json`` are called: diffusers' name, or transformers'."""
    return DIFFUSERS_STEM if config is not None and "_class_name" in config else HF_STEM


def target_dtypes(source: TensorSource, dtype: str | None, original: Mapping[str, str] | None = None) -> dict[str, str]:
    """The element type to store each tensor in.

    Args:
        source: the tensors.
        dtype: one type for all floating tensors, if given.
        original: the types to go back to otherwise, by name and ``*`` for the rest; by default they stay as they are.
    """
    original = original or {}
    result = {}
    for name, info in source.tensors.items():
        if not is_floating(info.dtype):
            result[name] = info.dtype
        else:
            result[name] = dtype or original.get(name) or original.get("*") or info.dtype
    return result


def total_bytes(source: TensorSource, dtypes: Mapping[str, str]) -> int:
    """Bytes of all tensors, stored in these element types."""
    return sum(math.prod(i.shape) * itemsize(dtypes[n]) for n, i in source.tensors.items())


def drop_ties(source: TensorSource, preferred: Sequence[str] = ()) -> TensorSource:
    """Keep one of the names that share their bytes: a preferred one, else the shortest."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, info in source.tensors.items():
        if info.storage is not None and info.nbytes:
            groups.setdefault(info.storage, []).append(name)
    dropped: set[str] = set()
    for names in groups.values():
        kept = min(names, key=lambda name: (name not in preferred, len(name), name))
        dropped |= set(names) - {kept}
    return rename(source, {name: name for name in source.tensors if name not in dropped}) if dropped else source


def split_shards(source: TensorSource, dtypes: Mapping[str, str], limit: int) -> list[list[str]]:
    """The names in each file, in stored order; a file has at most ``limit`` bytes of data, unless a tensor has more."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in source.tensors.items():
        nbytes = math.prod(info.shape) * itemsize(dtypes[name])
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def write_model_folder(
    folder: Path,
    source: TensorSource,
    *,
    dtypes: Mapping[str, str],
    stem: str,
    companions: Mapping[str, FileRecord] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int,
    workers: int = 1,
    extra: Mapping[str, Any] | None = None,
    sync: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, FileRecord]:
    """Complete a folder with safetensors files, an index if there are several, and the manifest.

    Args:
        folder: exists and holds nothing but ``companions``; the caller renames it into place.
        source: the tensors under the names to write.
        dtypes: element type by name.
        stem: what the weight files are called.
        companions: files that are there already, for the manifest.
        metadata: the free metadata of the files' headers.
        max_shard_size: bytes of tensor data per file.
        workers: files written at the same time.
        extra: further fields of the manifest.
        sync, on_bytes: see `write_file`.
    """
    shards = split_shards(source, dtypes, max_shard_size)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]

    def write(job: tuple[str, list[str]]) -> FileRecord:
        path, names = folder / job[0], job[1]
        return write_file(path, source, names, dtypes=dtypes, metadata=metadata or None, sync=sync, on_bytes=on_bytes)

    with ThreadPoolExecutor(workers, "write") as pool:
        files = dict(zip(names, pool.map(write, zip(names, shards, strict=True)), strict=True))
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = total_bytes(source, dtypes)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files[f"{stem}.safetensors.index.json"] = write_bytes(
            folder / f"{stem}.safetensors.index.json", dump_json(index), sync=sync
        )
    write_manifest(folder, make_manifest({**files, **(companions or {})}, extra or {}), sync=sync)
    return files


# The stems of weight files in the two folder layouts.
DIFFUSERS_STEM = "diffusion_pytorch_model"


HF_STEM = "model"
