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
    "ContextParallel": "attention.context",
    "FSDPPlan": "config",
    "FeaturesConfig": "config",
    "KeyedInitializer": "sharding.keyed_init",
    "MeshSizes": "sizes",
    "ParallelConfig": "config",
    "ParallelMesh": "mesh",
    "ParallelReport": "sharding.report",
    "PatternError": "patterns",
    "PlanError": "sharding.units",
    "RecomputePlan": "config",
    "SequenceShard": "attention.context",
    "SubPlan": "config",
    "apply_features": "activations.features",
    "check_features": "activations.features",
    "check_heads": "sizes",
    "clip_grad_norm": "sharding.grad_norm",
    "count_communication": "accounting",
    "default_device_type": "mesh",
    "match_modules": "patterns",
    "materialize": "sharding.meta_init",
    "meta_parameters": "sharding.meta_init",
    "parallelize": "sharding.fsdp",
    "prefetch": "sharding.grad_sync",
    "process_group_backend": "mesh",
    "reset_frozen": "sharding.grad_sync",
    "resolve_plan": "sharding.units",
    "set_gradient_sync": "sharding.grad_sync",
    "set_is_last_backward": "sharding.grad_sync",
    "set_requires_all_reduce": "sharding.grad_sync",
    "set_requires_gradient_sync": "sharding.grad_sync",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mm_parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mm_parallel.{_HOME[name]}"), name)
