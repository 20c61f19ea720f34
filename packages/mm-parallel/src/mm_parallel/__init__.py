"""Shard any ``nn.Module`` by name patterns, run attention across ranks, trade compute for memory.

Importing this package imports no torch: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ActivationOffloadPlan": "config",
    "CompilePlan": "config",
    "FSDPPlan": "config",
    "FeaturesConfig": "config",
    "MeshSizes": "sizes",
    "ParallelConfig": "config",
    "RecomputePlan": "config",
    "SubPlan": "config",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mm_parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mm_parallel.{_HOME[name]}"), name)
