"""From a run's checkpoint to folders that diffusers and transformers load, guided by the manifest alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mm_checkpoint._disk.build_folder import build_folder, check_free_space
from mm_checkpoint._disk.durable import write_bytes
from mm_checkpoint._disk.files import dump_json, read_json, safe_join
from mm_checkpoint._disk.iterations import resolve_iteration
from mm_checkpoint._disk.manifest import MANIFEST_NAME, read_manifest
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint._formats.model_folder import (
    DEFAULT_SHARD_SIZE,
    HF_STEM,
    drop_ties,
    parse_size,
    stem_of,
    target_dtypes,
    total_bytes,
    write_model_folder,
)
from mm_checkpoint._formats.safetensors import write_file
from mm_checkpoint._tensors.dtypes import parse_dtype
from mm_checkpoint._tensors.mapped import apply_key_map, rename, strip_prefix
from mm_checkpoint._tensors.source import TensorSource
from mm_checkpoint.errors import BadInputError, CorruptFileError, SourceError
from mm_checkpoint.key_map import KeyMap, get_key_map

EXPORT_FORMS = ("diffusers", "hf", "safetensors")
PIPELINE_INDEX = "model_index.json"


@dataclass(frozen=True)
class SubModel:
    """What a manifest says about one trained sub-model.

    Attributes:
        name: what the run calls it.
        prefix: its tensors are ``model.<prefix>*`` in the checkpoint; ``<name>.`` if none is given.
        key_map: name of the map between the source's names and these; None if they are the same.
        source_config: the ``config.json`` it was built from, unchanged.
        export_folder: its folder in a pipeline; the sub-model's name if none is given.
        export_prefix: put before every exported name.
        source_dtypes: element types to go back to, by native name and ``*`` (see `LoadReport`).
        ties: native names that the source lacks, to the name it has for the same tensor.
    """

    name: str
    prefix: str | None = None
    key_map: str | None = None
    source_config: Mapping[str, Any] | None = None
    export_folder: str | None = None
    export_prefix: str = ""
    source_dtypes: Mapping[str, str] | None = None
    ties: Mapping[str, str] | None = None

    @property
    def folder(self) -> str:
        return self.export_folder or self.name


def export(
    run_or_iteration: str | Path,
    destination: str | Path,
    *,
    to: str = "diffusers",
    dtype: str | None = None,
    base: str | Path | None = None,
    link: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    workers: int = 1,
    ema: bool = False,
    key_maps: Mapping[str, KeyMap] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write the sub-models of a checkpoint as model folders; weights that didn't change are bit for bit as loaded.

    Args:
        run_or_iteration: a run's folder (the tracker's iteration) or an iteration's.
        destination: a new or empty folder; each sub-model gets its export folder inside (``safetensors``: one file).
        to: ``diffusers`` (the source's names, back through the key map), ``hf`` (the model's own names) or
            ``safetensors`` (own names, one file per sub-model).
        dtype: element type for all floating tensors; by default each goes back to its type in the source.
        base: a pipeline folder (with ``model_index.json``); everything but the exported folders is taken from it, which
            makes ``destination`` a complete pipeline.
        link: link to the base's files instead of copying them.
        max_shard_size: bytes of tensor data per file, such as ``5GB``.
        ema: the running averages instead of the weights, where there are any.
        workers: files written at the same time.
        key_maps: maps by name, which come before the installed ones.
        on_start: called with the bytes of tensor data to write, before writing starts.
        on_bytes: called with the number of bytes after every piece.

    Returns:
        The folders (or files) that were written.

    Raises:
        BadInputError: no complete checkpoint, no sub-model in its manifest, an unknown key map, a base that isn't a
            pipeline or lacks the folder, a destination that is taken.
    """
    if to not in EXPORT_FORMS:
        raise BadInputError(f"to: {to!r} is not one of {', '.join(EXPORT_FORMS)}")
    dtype = None if dtype is None else parse_dtype(dtype)
    iteration = resolve_iteration(Path(run_or_iteration))
    manifest = read_manifest(iteration)
    models = _sub_models(iteration, manifest)
    if base is not None:
        _check_base(Path(base), models, to)
    target, limit = Path(destination), parse_size(max_shard_size)
    source = DcpSource(iteration)
    try:
        jobs = [_prepare(source, model, to, dtype, key_maps or {}, ema=ema) for model in models]
        total = sum(total_bytes(job.tensors, job.dtypes) for job in jobs)
        if on_start is not None:
            on_start(total)
        with build_folder(target) as partial:
            check_free_space(partial, total)
            extra = {"exported_from": iteration.name, "step": manifest.get("step")}
            for job in jobs:
                _write(partial, job, to, limit, workers, extra, on_bytes)
            if base is not None:
                _take_from_base(Path(base), partial, {model.folder for model in models}, link=link)
    finally:
        source.close()
    return [target / (f"{model.name}.safetensors" if to == "safetensors" else model.folder) for model in models]


@dataclass(frozen=True)
class _Job:
    """One sub-model to write: its tensors under the exported names, and the element type of each."""

    model: SubModel
    tensors: TensorSource
    dtypes: dict[str, str]


def _averaged(source: DcpSource, prefix: str, kept: Collection[str]) -> TensorSource:
    """The running averages of the tensors under ``prefix``; those without one (frozen) as they are.

    Args:
        kept: names below the prefix, one for each tensor. A tied one has its average under any of its names.
    """
    groups: dict[object, list[str]] = {}
    for full, info in source.tensors.items():
        if full.startswith(f"model.{prefix}"):
            name = full.removeprefix(f"model.{prefix}")
            groups.setdefault(info.storage or name, []).append(name)
    stored: dict[str, str] = {}
    for names in groups.values():
        average = next((f"ema.{prefix}{name}" for name in names if f"ema.{prefix}{name}" in source.tensors), None)
        stored |= {name: average or f"model.{prefix}{name}" for name in names if name in kept}
    if all(name.startswith("model.") for name in stored.values()):
        raise SourceError(f"{source.path}: holds no running average (ema) of {prefix.rstrip('.') or 'the model'}")
    return rename(source, {full: name for name, full in stored.items()})


def _prepare(
    source: DcpSource, model: SubModel, to: str, dtype: str | None, key_maps: Mapping[str, KeyMap], *, ema: bool
) -> _Job:
    own_prefix = f"{model.name}." if model.prefix is None else model.prefix
    prefix = f"model.{own_prefix}"
    tensors: TensorSource = strip_prefix(source, prefix)
    if not tensors.tensors:
        raise SourceError(f"{source.path}: its manifest names {model.name}, but no tensor starts with {prefix}")
    tensors = drop_ties(tensors, preferred=list((model.ties or {}).values()))
    if ema:
        tensors = _averaged(source, own_prefix, tensors.tensors.keys())
    dtypes = target_dtypes(tensors, dtype, model.source_dtypes)
    if model.key_map is not None and to == "diffusers":
        key_map = key_maps[model.key_map] if model.key_map in key_maps else get_key_map(model.key_map)
        mapped = apply_key_map(tensors, key_map, to="source")
        tensors, dtypes = mapped, {name: dtypes[mapped.origin(name)] for name in mapped.tensors}
    if model.export_prefix:
        tensors = rename(tensors, {name: model.export_prefix + name for name in tensors.tensors})
        dtypes = {model.export_prefix + name: dtype for name, dtype in dtypes.items()}
    return _Job(model, tensors, dtypes)


def _write(
    partial: Path,
    job: _Job,
    to: str,
    limit: int,
    workers: int,
    extra: Mapping[str, Any],
    on_bytes: Callable[[int], None] | None,
) -> None:
    if to == "safetensors":
        path = safe_join(partial, f"{job.model.name}.safetensors", found_in=MANIFEST_NAME)
        write_file(path, job.tensors, list(job.tensors.tensors), dtypes=job.dtypes, on_bytes=on_bytes)
        return
    folder = safe_join(partial, job.model.folder, found_in=MANIFEST_NAME)
    folder.mkdir(parents=True)
    config = job.model.source_config
    companions = {}
    if config is not None:
        companions["config.json"] = write_bytes(folder / "config.json", dump_json(config))
    write_model_folder(
        folder,
        job.tensors,
        dtypes=job.dtypes,
        stem=stem_of(config) if to == "diffusers" else HF_STEM,
        companions=companions,
        max_shard_size=limit,
        workers=workers,
        extra=extra,
        on_bytes=on_bytes,
    )


def _sub_models(iteration: Path, manifest: Mapping[str, Any]) -> list[SubModel]:
    entries = manifest.get("sub_models")
    if not isinstance(entries, dict) or not entries:
        raise BadInputError(f"{iteration}: its manifest names no sub_models, so there is nothing to export")
    known = SubModel.__dataclass_fields__.keys() - {"name"}
    models = []
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise CorruptFileError(f"{iteration / MANIFEST_NAME}: sub_models.{name} is no object")
        models.append(SubModel(name, **{key: value for key, value in entry.items() if key in known}))
        folder = models[-1].folder
        if PurePosixPath(folder).parts in ((), (MANIFEST_NAME,)) or [m.folder for m in models].count(folder) > 1:
            raise CorruptFileError(f"{iteration / MANIFEST_NAME}: sub_models.{name} has no export folder of its own")
    return models


def _check_base(base: Path, models: list[SubModel], to: str) -> None:
    if to != "diffusers":
        raise BadInputError(f"base: only goes with diffusers, not with {to}")
    index = read_json(base / PIPELINE_INDEX) if (base / PIPELINE_INDEX).is_file() else None
    if index is None:
        raise SourceError(f"{base}: no {PIPELINE_INDEX}, so this is no pipeline folder")
    for model in models:
        if model.folder not in index:
            parts = ", ".join(name for name, value in index.items() if isinstance(value, list))
            raise SourceError(f"{base}: the pipeline has no component {model.folder} (it has {parts})")


def _take_from_base(base: Path, target: Path, exported: set[str], *, link: bool) -> None:
    for path in sorted(base.iterdir()):
        if path.name in exported:
            continue
        if link:
            (target / path.name).symlink_to(path.resolve())
        elif path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)
