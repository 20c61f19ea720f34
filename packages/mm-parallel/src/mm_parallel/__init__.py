"""Shard any ``nn.Module`` by name patterns, run attention across ranks, trade compute for memory.

Importing this package imports no torch: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ActivationOffloadPlan": "config",
    "Communication": "accounting",
    "CompilePlan": "config",
    "ContextParallel": "context",
    "FSDPPlan": "config",
    "FeaturesConfig": "config",
    "KeyedInitializer": "keyed_init",
    "MeshSizes": "sizes",
    "ParallelConfig": "config",
    "ParallelMesh": "mesh",
    "ParallelReport": "report",
    "PatternError": "patterns",
    "PlanError": "units",
    "RecomputePlan": "config",
    "SequenceShard": "context",
    "SubPlan": "config",
    "apply_features": "features",
    "check_features": "features",
    "check_heads": "sizes",
    "clip_grad_norm": "grad_norm",
    "count_communication": "accounting",
    "default_device_type": "mesh",
    "match_modules": "patterns",
    "materialize": "meta_init",
    "meta_parameters": "meta_init",
    "parallelize": "fsdp",
    "prefetch": "grad_sync",
    "process_group_backend": "mesh",
    "reset_frozen": "grad_sync",
    "resolve_plan": "units",
    "set_gradient_sync": "grad_sync",
    "set_is_last_backward": "grad_sync",
    "set_requires_all_reduce": "grad_sync",
    "set_requires_gradient_sync": "grad_sync",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mm_parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mm_parallel.{_HOME[name]}"), name)
