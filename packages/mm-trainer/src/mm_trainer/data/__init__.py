"""From files on disk to balanced batches: metadata, reading, shaping, order, loading."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_trainer.data.cache.dataset import CachedDataset
    from mm_trainer.data.cache.recipe import make_cache
    from mm_trainer.data.cache.writer import write_cache
    from mm_trainer.data.latents import LatentsDataset
    from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
    from mm_trainer.data.loaders import build_loader, build_validation
    from mm_trainer.data.metadata.formats import read_table
    from mm_trainer.data.open import open_datasets
    from mm_trainer.data.order import DataOrder
    from mm_trainer.data.report import DataReport
    from mm_trainer.data.survey.contact_sheet import write_contact_sheet
    from mm_trainer.data.video.dataset import VideoDataset

_HOME = {
    "BatchLoader": "loader",
    "CachedDataset": "cache.dataset",
    "DataOrder": "order",
    "DataReport": "report",
    "LatentsDataset": "latents",
    "VideoDataset": "video.dataset",
    "WorkerOptions": "loader",
    "build_loader": "loaders",
    "build_validation": "loaders",
    "fixed_batches": "loader",
    "make_cache": "cache.recipe",
    "open_datasets": "open",
    "read_table": "metadata.formats",
    "write_cache": "cache.writer",
    "write_contact_sheet": "survey.contact_sheet",
}

__all__ = [
    "BatchLoader",
    "CachedDataset",
    "DataOrder",
    "DataReport",
    "LatentsDataset",
    "VideoDataset",
    "WorkerOptions",
    "build_loader",
    "build_validation",
    "fixed_batches",
    "make_cache",
    "open_datasets",
    "read_table",
    "write_cache",
    "write_contact_sheet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
