"""From files on disk to balanced batches: metadata, reading, shaping, order, loading."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "BatchLoader": "loader",
    "DataOrder": "order",
    "DataReport": "report",
    "LatentsDataset": "latents",
    "VideoDataset": "video",
    "WorkerOptions": "loader",
    "CachedDataset": "cache",
    "build_loader": "build",
    "build_validation": "build",
    "make_cache": "build_cache",
    "open_datasets": "build",
    "write_cache": "cache_writer",
    "write_contact_sheet": "contact_sheet",
    "fixed_batches": "loader",
    "read_table": "metadata_formats",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
