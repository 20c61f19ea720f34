"""Converting weights between all forms as a stream: no model is built, and memory holds pieces, not tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.build_folder import build_folder, check_destination, check_free_space, remove
from mm_checkpoint._disk.durable import FileRecord, checksum_file, durable_file, partial_path, sync_folder
from mm_checkpoint._disk.manifest import MANIFEST_NAME, METADATA_NAME, make_manifest, read_manifest, write_manifest
from mm_checkpoint._formats.dcp_metadata import Extent
from mm_checkpoint._formats.dcp_writer import chunk_file_name, describe_tensor, write_metadata, write_tensor
from mm_checkpoint._formats.model_folder import (
    DEFAULT_SHARD_SIZE,
    DIFFUSERS_STEM,
    HF_STEM,
    drop_ties,
    parse_size,
    target_dtypes,
    total_bytes,
    write_model_folder,
)
from mm_checkpoint._formats.safetensors import SafetensorsSource, chunk_boxes, stream_pieces, write_file
from mm_checkpoint._tensors.dtypes import parse_dtype, to_torch
from mm_checkpoint._tensors.mapped import apply_key_map, strip_prefix
from mm_checkpoint._tensors.source import TensorSource
from mm_checkpoint._weights.sources import WeightSource, find_source, is_weight_index
from mm_checkpoint.errors import BadInputError, SourceError
from mm_checkpoint.key_map import KeyMap, get_key_map

CONVERT_FORMS = ("hf", "diffusers", "dcp", "safetensors")
# Small files that make a folder usable (configuration, tokenizer) are copied too; weights and indexes aren't.
_COMPANIONS = (".json", ".txt", ".model", ".jinja")
_COMPANION_LIMIT = 64 << 20


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: the destination, the number of tensors, and the bytes of tensor data written."""

    destination: Path
    tensors: int
    nbytes: int


def convert(
    source: str | Path | WeightSource,
    destination: str | Path,
    *,
    to: str,
    key_map: KeyMap | str | None = None,
    dtype: str | None = None,
    prefix: str = "",
    variant: str | None = None,
    workers: int = 1,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    on_start: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Conversion:
    """Convert weights to another form. An interrupted conversion leaves nothing at ``destination``.

    Args:
        source: a folder or file, or what `resolve_source` returned.
        destination: a new or empty folder; for ``safetensors`` a new file.
        to: ``hf``, ``diffusers``, ``dcp`` or ``safetensors`` (one file).
        key_map: renames: to the source's names for ``diffusers``, to native names for the other forms.
        dtype: element type for all floating tensors; by default they stay as they are.
        prefix: take only the names that start with it, and strip it.
        variant: which of several sets of files in the source folder, such as ``fp16``.
        workers: threads, each writing files of its own.
        max_shard_size: bytes of tensor data per file (``hf`` and ``diffusers``).
        on_start: called with the number of bytes to write, before writing starts.
        on_bytes: called with the number of bytes after every piece.

    Raises:
        BadInputError: the source, the map, the type or the destination can't be used.
        SaveError: the disk is too full.
    """
    if to not in CONVERT_FORMS:
        raise BadInputError(f"to: {to!r} is not one of {', '.join(CONVERT_FORMS)}")
    dtype = None if dtype is None else parse_dtype(dtype)
    limit = parse_size(max_shard_size)
    key_map = get_key_map(key_map) if isinstance(key_map, str) else key_map
    target = Path(destination)
    found = source if isinstance(source, WeightSource) else find_source(Path(source), variant=variant)
    opened = found.open()
    try:
        tensors = _select(found, opened, prefix)
        if to != "dcp":
            tensors = drop_ties(tensors)
        if key_map is not None:
            tensors = apply_key_map(tensors, key_map, to="source" if to == "diffusers" else "native")
        dtypes = target_dtypes(tensors, dtype)
        total = total_bytes(tensors, dtypes)
        if on_start is not None:
            on_start(total)
        metadata = _free_metadata(found, opened)
        if to == "safetensors":
            _write_one_file(target, tensors, dtypes, metadata, total, on_bytes)
            return Conversion(target, len(tensors.tensors), total)
        shared: dict[str, Any] = {"dtypes": dtypes, "workers": workers, "on_bytes": on_bytes}
        shared["extra"] = {"converted_from": found.format, "metadata": metadata}
        with build_folder(target) as partial:
            check_free_space(partial, total)
            shared["companions"] = copy_companions(found, partial)
            if to == "dcp":
                write_dcp_folder(partial, tensors, **shared)
            else:
                stem = DIFFUSERS_STEM if to == "diffusers" else HF_STEM
                write_model_folder(partial, tensors, stem=stem, metadata=metadata, max_shard_size=limit, **shared)
        return Conversion(target, len(tensors.tensors), total)
    finally:
        opened.close()


def _select(found: WeightSource, tensors: TensorSource, prefix: str) -> TensorSource:
    if prefix:
        selected = strip_prefix(tensors, prefix)
        if not selected.tensors:
            raise SourceError(f"{found.path}: no tensor's name starts with {prefix!r}")
        return selected
    # Converting all of a run would put its optimizer's moments among the weights.
    if found.format == "dcp" and _manifest_of(found).get("sub_models"):
        raise SourceError(
            f"{found.path}: is a checkpoint of a training run, optimizer included; export its trained part with "
            "`mm-checkpoint export`, or select tensors by a prefix such as model.NAME."
        )
    if not tensors.tensors:
        raise SourceError(f"{found.path}: holds no tensors")
    return tensors


def _free_metadata(found: WeightSource, opened: TensorSource) -> dict[str, str]:
    """The free metadata of safetensors headers, which a DCP folder keeps in its manifest."""
    if isinstance(opened, SafetensorsSource):
        return opened.metadata
    return dict(_manifest_of(found).get("metadata") or {}) if found.format == "dcp" else {}


def _manifest_of(found: WeightSource) -> dict[str, Any]:
    """The manifest of a DCP folder; empty for one that torch alone wrote."""
    return read_manifest(found.files[0]) if (found.files[0] / MANIFEST_NAME).is_file() else {}


def _write_one_file(
    target: Path,
    tensors: TensorSource,
    dtypes: Mapping[str, str],
    metadata: Mapping[str, str],
    total: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    check_destination(target)
    if target.is_dir() or target.suffix != ".safetensors":
        raise BadInputError(f"{target}: with --to safetensors the destination is a file named *.safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    check_free_space(target.parent, total)
    partial = partial_path(target)
    try:
        # Flushed, renamed, and the rename flushed: a file under the final name is always whole.
        write_file(partial, tensors, list(tensors.tensors), dtypes=dtypes, metadata=metadata or None, on_bytes=on_bytes)
        partial.rename(target)
        sync_folder(target.parent)
    finally:
        remove(partial)


def write_dcp_folder(
    folder: Path,
    tensors: TensorSource,
    *,
    dtypes: Mapping[str, str],
    workers: int,
    companions: Mapping[str, FileRecord],
    extra: Mapping[str, Any],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fill an empty folder with a DCP checkpoint: one chunk file per worker, tensors in chunks of `PIECE_BYTES`.

    Chunks keep memory small here, and keep torch's own reader, which loads whole chunks, from reading a tensor N times
    for N ranks.
    """
    # A file per worker: files are written front to back, so that threads can't share one.
    shares = _share_out(tensors, workers)

    def write(job: tuple[int, list[str]]) -> tuple[FileRecord, dict[tuple[str, tuple[int, ...] | None], Extent]]:
        name = chunk_file_name(job[0])
        extents: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
        with durable_file(folder / name) as file:
            for key in job[1]:
                boxes = chunk_boxes(tensors.tensors[key])
                for box, piece in zip(boxes, stream_pieces(tensors, key, dtypes[key]), strict=True):
                    extents[key, box.offsets] = write_tensor(file, name, piece)
                    if on_bytes is not None:
                        on_bytes(piece.nbytes)
            return file.finish(), extents

    with ThreadPoolExecutor(len(shares), "convert") as pool:
        written = list(pool.map(write, enumerate(shares)))
    files = {chunk_file_name(number): record for number, (record, _) in enumerate(written)}
    extents = {place: extent for _, part in written for place, extent in part.items()}
    # Each file after those it describes, as in a save.
    files[METADATA_NAME] = write_metadata(folder, _metadata(tensors, dtypes), extents)
    write_manifest(folder, make_manifest({**files, **companions}, extra))


def _metadata(tensors: TensorSource, dtypes: Mapping[str, str]) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    entries = {
        name: describe_tensor(to_torch(dtypes[name]), info.shape, list(chunk_boxes(info)))
        for name, info in tensors.tensors.items()
    }
    return Metadata(state_dict_metadata=entries, planner_data={name: (name,) for name in entries})


def _share_out(tensors: TensorSource, workers: int) -> list[list[str]]:
    """Deal the names out to ``workers`` lists of about equal bytes, each in stored order."""
    shares: list[list[str]] = [[] for _ in range(max(1, workers))]
    loads = [0] * len(shares)
    for name, info in tensors.tensors.items():
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += info.nbytes
    return [share for share in shares if share] or [[]]


def copy_companions(found: WeightSource, folder: Path) -> dict[str, FileRecord]:
    """Copy the configuration and tokenizer files from beside the weights."""
    records: dict[str, FileRecord] = {}
    if found.path.is_file():
        return records
    origin = found.files[0] if found.format == "dcp" else found.path
    for path in sorted(origin.iterdir()):
        weighs = is_weight_index(path.name) or path.name == MANIFEST_NAME or not path.is_file()
        if not weighs and path.suffix in _COMPANIONS and path.stat().st_size <= _COMPANION_LIMIT:
            shutil.copyfile(path, folder / path.name)
            records[path.name] = checksum_file(folder / path.name)  # the copy is what the manifest vouches for
    return records
