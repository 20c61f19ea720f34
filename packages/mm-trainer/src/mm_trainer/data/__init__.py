"""From files on disk to balanced batches: metadata, reading, shaping, order, loading."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "BatchLoader": "loader",
    "DataOrder": "order",
    "DataReport": "report",
    "LatentsDataset": "latents",
    "VideoDataset": "video.dataset",
    "WorkerOptions": "loader",
    "CachedDataset": "cache.dataset",
    "build_loader": "loaders",
    "build_validation": "loaders",
    "make_cache": "cache.recipe",
    "open_datasets": "open",
    "write_cache": "cache.writer",
    "write_contact_sheet": "survey.contact_sheet",
    "fixed_batches": "loader",
    "read_table": "metadata.formats",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
