"""Shard any ``nn.Module`` by name patterns, run attention across ranks, trade compute for memory.

Importing this package imports no torch: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_parallel.accounting import Communication, count_communication
    from mm_parallel.activations.features import apply_features, check_features
    from mm_parallel.attention.context import ContextParallel, SequenceShard
    from mm_parallel.config import (
        ActivationOffloadPlan,
        CompilePlan,
        FeaturesConfig,
        FSDPPlan,
        ParallelConfig,
        RecomputePlan,
        SubPlan,
    )
    from mm_parallel.devices import accelerator, default_device_type, device_count
    from mm_parallel.errors import FieldError, PatternError, PlanError
    from mm_parallel.mesh import ParallelMesh, process_group_backend
    from mm_parallel.patterns import match_modules
    from mm_parallel.sharding.fsdp import parallelize
    from mm_parallel.sharding.grad_norm import clip_grad_norm
    from mm_parallel.sharding.grad_sync import (
        prefetch,
        reset_frozen,
        set_gradient_sync,
        set_is_last_backward,
        set_requires_all_reduce,
        set_requires_gradient_sync,
    )
    from mm_parallel.sharding.keyed_init import KeyedInitializer
    from mm_parallel.sharding.meta_init import materialize, meta_parameters
    from mm_parallel.sharding.report import ParallelReport
    from mm_parallel.sharding.units import resolve_plan
    from mm_parallel.sharding.unwritten import find_unwritten
    from mm_parallel.sizes import MeshSizes, check_heads

_HOME = {
    "ActivationOffloadPlan": "config",
    "Communication": "accounting",
    "CompilePlan": "config",
    "ContextParallel": "attention.context",
    "FSDPPlan": "config",
    "FeaturesConfig": "config",
    "FieldError": "errors",
    "KeyedInitializer": "sharding.keyed_init",
    "MeshSizes": "sizes",
    "ParallelConfig": "config",
    "ParallelMesh": "mesh",
    "ParallelReport": "sharding.report",
    "PatternError": "errors",
    "PlanError": "errors",
    "RecomputePlan": "config",
    "SequenceShard": "attention.context",
    "SubPlan": "config",
    "accelerator": "devices",
    "apply_features": "activations.features",
    "check_features": "activations.features",
    "check_heads": "sizes",
    "clip_grad_norm": "sharding.grad_norm",
    "count_communication": "accounting",
    "default_device_type": "devices",
    "device_count": "devices",
    "find_unwritten": "sharding.unwritten",
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

__all__ = [
    "ActivationOffloadPlan",
    "Communication",
    "CompilePlan",
    "ContextParallel",
    "FSDPPlan",
    "FeaturesConfig",
    "FieldError",
    "KeyedInitializer",
    "MeshSizes",
    "ParallelConfig",
    "ParallelMesh",
    "ParallelReport",
    "PatternError",
    "PlanError",
    "RecomputePlan",
    "SequenceShard",
    "SubPlan",
    "accelerator",
    "apply_features",
    "check_features",
    "check_heads",
    "clip_grad_norm",
    "count_communication",
    "default_device_type",
    "device_count",
    "find_unwritten",
    "match_modules",
    "materialize",
    "meta_parameters",
    "parallelize",
    "prefetch",
    "process_group_backend",
    "reset_frozen",
    "resolve_plan",
    "set_gradient_sync",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
