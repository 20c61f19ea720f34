"""From a folder or file to the tensors in it: sniffing, precedence, indexes, variants."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.files import read_json, safe_join
from mm_checkpoint._disk.iterations import find_weights_iteration
from mm_checkpoint._disk.manifest import METADATA_NAME
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint._formats.model_folder import DIFFUSERS_STEM, HF_STEM
from mm_checkpoint._formats.safetensors import SafetensorsSource
from mm_checkpoint._formats.torch_file import TorchFileSource
from mm_checkpoint._tensors.source import TensorSource
from mm_checkpoint.config import WeightSourceConfig, normalize_format
from mm_checkpoint.errors import CorruptFileError, SourceError, sample

_PICKLED = (".bin", ".pth", ".pt")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_INDEX = re.compile(r"[^.]+\.(?:([^.]+)\.)?(?:safetensors|bin)\.index(?:\.([^.]+))?\.json")
_FILE = re.compile(r"[^.]+?(?:\.([^.]+?))?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin|pth|pt)")


@dataclass(frozen=True)
class WeightSource:
    """A weight source that was found, not yet read.

    Attributes:
        path: the folder or file.
        format: ``hf``, ``diffusers`` or ``dcp``: how its tensors are named and stored.
        files: the weight files, in order; for DCP the folder that holds ``.metadata``.
        weight_map: tensor name to file name, where the folder has an index.
        config: the folder's ``config.json``, if there is one.
        cache: where to convert it to DCP before loading (``load_format: dcp`` on another form), or None.
        allow_missing, broadcast_from_rank0: from the configuration.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None = field(default=None, repr=False)
    config: dict[str, Any] | None = field(default=None, repr=False)
    cache: Path | None = None
    allow_missing: tuple[str, ...] = ()
    broadcast_from_rank0: bool = False

    def describe(self) -> str:
        """One line for logs."""
        through = f", converted once into {self.cache}" if self.cache else ""
        count = "" if self.format == "dcp" else f", {len(self.files)} file(s)"
        return f"{self.path} ({self.format}{count}{through})"

    def open(self) -> TensorSource:
        """The tensors of this source (headers are read and checked, data is not).

        Raises:
            SourceError, CorruptFileError: a file is missing, unreadable or contradicts its index.
        """
        if self.format == "dcp":
            return DcpSource(self.files[0])
        if self.files[0].suffix in _PICKLED:
            return TorchFileSource(self.path, self.files, self.weight_map)
        return SafetensorsSource(self.path, self.files, self.weight_map)


def resolve_source(config: WeightSourceConfig) -> WeightSource | None:
    """Settle which weights a configuration means; None if it names none. Reads only names and json.

    Raises:
        SourceError: the path doesn't exist, holds no weights, several variants, or not the declared format; or
            ``load_format: dcp`` has nowhere to convert to.
        CorruptFileError: an index or ``config.json`` that can't be read, or an index that leaves its folder.
    """
    declared = config.format
    named = config.checkpoint_path or config.from_pretrained
    if named is None:
        return None
    if declared != "dcp":
        return _with_options(find_source(Path(named), declared), config)
    if config.checkpoint_path and _is_dcp(Path(config.checkpoint_path)):
        found = find_source(Path(config.checkpoint_path), "dcp")
        # A cache that an earlier start filled from `from_pretrained` is checked against that source, not trusted.
        if not (_is_conversion(found.files[0]) and config.from_pretrained):
            return _with_options(found, config)
    return _with_options(_convertible(config), config)


def _convertible(config: WeightSourceConfig) -> WeightSource:
    """The source behind ``load_format: dcp``, with the cache it is converted into unless it is DCP itself."""
    if config.conversion_dir:
        origin = config.checkpoint_path or config.from_pretrained
        cache: str | None = config.conversion_dir
    else:
        origin, cache = config.from_pretrained, config.checkpoint_path
    if origin is None and cache is not None and Path(cache).exists():
        origin, cache = cache, None  # only checkpoint_path is named, and it isn't a DCP folder
    if origin is None:
        raise SourceError(f"checkpoint_path: {config.checkpoint_path} doesn't exist, and no from_pretrained to fill it")
    source = find_source(Path(origin), "auto")
    if source.format == "dcp":
        return source
    if cache is None:
        raise SourceError(
            f"load_format: dcp: {origin} is in {source.format} form and has to be converted, but no cache is named: "
            "set checkpoint_conversion_dir, dcp_cache_dir, dcp_conversion_dir or checkpoint_path"
        )
    return replace(source, cache=Path(cache))


def _with_options(source: WeightSource, config: WeightSourceConfig) -> WeightSource:
    return replace(source, allow_missing=tuple(config.allow_missing), broadcast_from_rank0=config.broadcast_from_rank0)


def sniff_format(path: str | Path) -> str:
    """``dcp``, ``diffusers`` or ``hf``, by what is there.

    Raises:
        SourceError: nothing is there, or nothing of a known form.
    """
    path = Path(path)
    if not path.exists():
        raise SourceError(f"{path}: no such file or folder{_nearest_folder(path)}")
    if path.is_file():
        return "diffusers" if path.name.startswith(DIFFUSERS_STEM) else "hf"
    if _is_dcp(path):
        return "dcp"
    if (path / "model_index.json").is_file():
        raise SourceError(f"{path}: is a whole pipeline; name one of its folders: {sample(_model_folders(path))}")
    config = _read_config(path) or {}
    if any(path.glob(f"{DIFFUSERS_STEM}*")) or "_diffusers_version" in config:
        return "diffusers"
    if any(path.glob("*.safetensors")) or any(f for suffix in _PICKLED for f in path.glob(f"*{suffix}")):
        return "hf"
    models = _model_folders(path)
    hint = f"; its folders {sample(models)} look like models" if models else ""
    raise SourceError(f"{path}: no weights in DCP, diffusers or hf form are there{hint}")


def _model_folders(path: Path) -> list[str]:
    return [child.name for child in sorted(path.iterdir()) if (child / "config.json").is_file()]


def find_source(path: Path, declared: str = "auto", *, variant: str | None = None) -> WeightSource:
    """The source at ``path``.

    Args:
        path: a folder, or one ``.safetensors`` / ``.pth`` / ``.pt`` / ``.bin`` file, or an index json.
        declared: its format, if known; ``auto`` sniffs.
        variant: which of several sets of files (``fp16`` for ``model.fp16.safetensors``); the plain one by default.

    Raises:
        SourceError, CorruptFileError: see `resolve_source`.
    """
    declared = normalize_format(declared)
    found = sniff_format(path)
    if "dcp" in (declared, found) and declared not in ("auto", found):
        raise SourceError(f"{path}: is in {found} form, not in the declared {declared}")
    form = found if declared == "auto" else declared
    if form == "dcp":
        folder = find_weights_iteration(path)
        return WeightSource(path, form, (folder,), config=_read_config(path))
    if path.is_file() and not is_weight_index(path.name):
        if path.suffix not in (".safetensors", *_PICKLED):
            raise SourceError(f"{path}: neither .safetensors nor one of {', '.join(_PICKLED)}")
        return WeightSource(path, form, (path,), config=_read_config(path.parent))
    folder = path if path.is_dir() else path.parent
    index = path if path.is_file() else None
    files, weight_map = _weight_files(folder, index, variant)
    return WeightSource(path, form, files, weight_map, _read_config(folder))


def _weight_files(
    folder: Path, index: Path | None, variant: str | None
) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The files that belong together: those of an index, or a single file; safetensors before pickles."""
    if index is None:
        index = _choose(folder, [f for f in sorted(folder.iterdir()) if is_weight_index(f.name)], variant)
    if index is not None:
        weight_map = _read_index(index)
        files = [safe_join(folder, name, found_in=str(index)) for name in dict.fromkeys(weight_map.values())]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise SourceError(f"{index}: names {len(missing)} file(s) that are not there: {sample(missing)}")
        return tuple(files), weight_map
    for suffixes in ((".safetensors",), _PICKLED):
        files = sorted(f for f in folder.iterdir() if f.suffix in suffixes and f.is_file())
        shards = [f for f in files if _SHARD.search(f.stem)]
        whole = _choose(folder, [f for f in files if f not in shards], variant)
        if whole is not None:
            return (whole,), None
        if shards:
            raise SourceError(f"{folder}: {len(shards)} shard(s) such as {shards[0].name}, but no index json")
    raise SourceError(f"{folder}: no weight files" + (f" of variant {variant!r}" if variant else ""))


def _choose(folder: Path, files: list[Path], variant: str | None) -> Path | None:
    """One of several candidates: the variant asked for, else the one without a variant, else the only one."""
    if variant is not None:
        files = [f for f in files if _variant_of(f.name) == variant]
    elif len(files) > 1:
        plain = [f for f in files if _variant_of(f.name) is None]
        usual = [f for f in plain if f.name.split(".")[0] in (HF_STEM, DIFFUSERS_STEM, "pytorch_model")]
        safe = [f for f in usual if ".safetensors" in f.name]
        files = safe or usual or files
    if len(files) > 1:
        raise SourceError(f"{folder}: several sets of weights: {sample(f.name for f in files)}; name one file")
    return files[0] if files else None


def is_weight_index(name: str) -> bool:
    """Whether a file of this name says which tensor is in which shard."""
    return _INDEX.fullmatch(name) is not None


def _variant_of(name: str) -> str | None:
    """``fp16`` for ``model.fp16.safetensors``, its shards, and either way of naming their index."""
    match = _INDEX.fullmatch(name) or _FILE.fullmatch(name)
    return next((found for found in match.groups() if found), None) if match else None


def _read_index(path: Path) -> dict[str, str]:
    content = read_json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise CorruptFileError(f"{path}: has no weight_map from tensor names to file names")
    return weight_map


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else None


def _is_dcp(path: Path) -> bool:
    if (path / METADATA_NAME).is_file():
        return True
    return (path.is_dir() and any((child / METADATA_NAME).is_file() for child in path.glob("iter_*"))) or (
        path / "release" / METADATA_NAME
    ).is_file()


def _is_conversion(folder: Path) -> bool:
    manifest = folder / "manifest.json"
    return manifest.is_file() and "source_fingerprint" in read_json(manifest)


def _nearest_folder(path: Path) -> str:
    """Where a path stops existing, which is what a person needs to know about a wrong one."""
    parent = path
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return f" ({parent} exists)" if parent != path.parent else ""
