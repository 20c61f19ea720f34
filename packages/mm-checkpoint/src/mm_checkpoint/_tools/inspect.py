"""What is at a path, as plain values for people and scripts.

Only headers are read, and torch is imported only for pickled weight files.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from mm_checkpoint._disk.files import read_json
from mm_checkpoint._disk.iterations import TRACKER_NAME, damage_of, list_iterations
from mm_checkpoint._disk.manifest import MANIFEST_NAME, read_manifest
from mm_checkpoint._formats.dcp_reader import DcpSource
from mm_checkpoint._tensors.source import TensorInfo
from mm_checkpoint._weights.sources import find_source


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe a run, an iteration, a model folder, a pipeline folder or one weight file.

    Returns:
        ``kind`` (``run``, ``pipeline``, ``weights``), and by kind: ``iterations`` and ``tracker``; ``components``;
        ``format``, ``files``, ``parameters``, ``bytes``, ``dtypes``, ``tensors`` (name to shape, dtype, bytes, file),
        ``values`` (names of what isn't a tensor) and ``manifest``.

    Raises:
        SourceError, CorruptFileError: there is nothing of a known form, or it is unreadable.
    """
    path = Path(path)
    iterations = list_iterations(path)
    if iterations:
        return _inspect_run(path, iterations)
    if (path / "model_index.json").is_file():
        index = read_json(path / "model_index.json")
        parts = [name for name, value in index.items() if isinstance(value, list) and (path / name).is_dir()]
        return {"kind": "pipeline", "path": str(path), "class": index.get("_class_name"), "components": parts}
    return _inspect_weights(path)


def _inspect_run(path: Path, iterations: list[tuple[int, Path]]) -> dict[str, Any]:
    entries = []
    for step, folder in iterations:
        damage = damage_of(folder)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        entries.append(
            {"step": step, "folder": folder.name, "bytes": size, "complete": damage is None, "damage": damage}
        )
    tracker = (path / TRACKER_NAME).read_text().strip() if (path / TRACKER_NAME).is_file() else None
    return {"kind": "run", "path": str(path), "tracker": tracker, "iterations": entries}


def _inspect_weights(path: Path) -> dict[str, Any]:
    found = find_source(path)
    source = found.open()
    try:
        infos = source.tensors
        values = list(source.metadata.values) if isinstance(source, DcpSource) else []
        folder = found.files[0] if found.format == "dcp" else found.files[0].parent
        files = sorted({name for info in infos.values() for name in info.file.split(", ") if name})
        dtypes = Counter[str]()
        for info in infos.values():
            dtypes[info.dtype] += math.prod(info.shape)
        return {
            "kind": "weights",
            "path": str(path),
            "format": found.format,
            "files": {name: (folder / name).stat().st_size for name in files},
            "parameters": sum(math.prod(info.shape) for info in infos.values()),
            "bytes": sum(info.nbytes for info in infos.values()),
            "dtypes": dict(dtypes.most_common()),
            "tensors": {name: _describe(info) for name, info in infos.items()},
            "values": values,
            "manifest": read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None,
        }
    finally:
        source.close()


def _describe(info: TensorInfo) -> dict[str, Any]:
    return {"shape": list(info.shape), "dtype": info.dtype, "bytes": info.nbytes, "file": info.file}


def key_tree(tensors: dict[str, dict[str, Any]]) -> list[str]:
    """Names as an indented tree; numbered siblings of one shape are folded into one line (``blocks.{0-39}``)."""
    root: dict[str, Any] = {}
    for name, info in tensors.items():
        node = root
        *parents, last = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = (tuple(info["shape"]), info["dtype"])
    return list(_render(root, 0))


def _render(node: dict[str, Any], depth: int) -> Any:
    for label, child in _fold(node):
        if isinstance(child, dict):
            yield f"{'  ' * depth}{label}"
            yield from _render(child, depth + 1)
        else:
            shape, dtype = child
            yield f"{'  ' * depth}{label}  {list(shape)} {dtype}"


def _fold(node: dict[str, Any]) -> list[tuple[str, Any]]:
    """Merge runs of equal numbered children into one entry."""
    entries: list[tuple[str, Any]] = []
    run: list[int] = []
    for name, child in node.items():
        follows = name.isdigit() and run and int(name) == run[-1] + 1 and child == entries[-1][1]
        if follows:
            run.append(int(name))
            entries[-1] = (f"{{{run[0]}-{run[-1]}}}", child)
        else:
            run = [int(name)] if name.isdigit() else []
            entries.append((name, child))
    return entries
