"""``parallelize``: a plan becomes FSDP2 units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from mm_parallel.config import FSDPPlan
from mm_parallel.devices import accelerator
from mm_parallel.errors import PlanError
from mm_parallel.mesh import ParallelMesh
from mm_parallel.sharding.buffer_guard import forbid_changing_buffers
from mm_parallel.sharding.compute_dtype import Slot, cast_outputs, cast_parameters_in_forward
from mm_parallel.sharding.report import ParallelReport, SubModelReport, UnitReport
from mm_parallel.sharding.units import SubModel, resolve_plan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


def parallelize(
    model: nn.Module,
    *,
    mesh: ParallelMesh,
    plan: FSDPPlan,
    sub_models: Mapping[str, nn.Module] | None = None,
) -> ParallelReport:
    """Shard ``model`` in place; call on every rank, after freezing and ``apply_features``, before ``materialize``.

    Each sub-model is a root: what no pattern names is one unit at the root. ``reshard_after_forward`` is always
    passed explicitly, and as True to the root of a frozen sub-model, which would otherwise stay gathered. Inputs are
    never cast: a model casts for itself, inside the forward of the unit that owns the weight.

    On a single rank nothing is sharded: forwards run in the plan's dtype by other means, and the report says so.

    Args:
        model: patterns are matched against its ``named_modules()``.
        mesh: the ranks.
        plan: see :class:`FSDPPlan`.
        sub_models: by name, the modules that are each a root of their own (``model`` itself is then not wrapped);
            None makes ``model`` the only root.

    Returns:
        What was wrapped; print it.

    Raises:
        PatternError: a pattern that matches nothing.
        PlanError: a plan that contradicts itself or the model.
    """
    resolved = resolve_plan(model, plan, sub_models)
    notes = list(resolved.notes)
    enabled = [sub_model for sub_model in resolved.sub_models if sub_model.plan.enabled]
    whole = {s.name or "model": s.module for s in resolved.sub_models if not s.plan.enabled}
    whole |= {name: model.get_submodule(name) for names in resolved.ignored.values() for name in names}
    return ParallelReport(
        matches=resolved.matches,
        ignored=resolved.ignored,
        sub_models=[_apply(sub_model, mesh, plan, notes) for sub_model in enabled],
        units=[UnitReport(u.name, s.name, u.numel, u.trainable_numel) for s in enabled for u in s.units],
        plain={name: sum(p.numel() for p in module.parameters()) for name, module in whole.items()},
        notes=notes,
    )


def _apply(sub_model: SubModel, mesh: ParallelMesh, plan: FSDPPlan, notes: list[str]) -> SubModelReport:
    name = sub_model.name
    reshard, offload = plan.reshard_for(name), plan.offload_for(name)
    if mesh.sizes.world == 1 and not offload:  # offload is FSDP2's own work, with one rank too
        _cast_in_forward(sub_model, plan)
        return SubModelReport(name, "one rank: not sharded, FSDP2 bypassed", reshard, offload)
    if offload:
        _check_cpu_backend(name)
    device_mesh = mesh.fsdp(sub_model.plan.shard_size)
    replicas = device_mesh.size() // device_mesh["shard"].size() if device_mesh.ndim == 2 else 1
    _shard(sub_model, plan, mesh=device_mesh, reshard=reshard, offload=offload)
    if replicas > 1 and sub_model.trainable:  # FSDP2 keeps replicas' parameters equal, but not their buffers
        forbid_changing_buffers(sub_model.module, name)
    forward = _set_prefetch(sub_model, plan.num_to_forward_prefetch, backward=False)
    backward = _set_prefetch(sub_model, plan.num_to_backward_prefetch, backward=True)
    inner = len(sub_model.units) - 1
    if max(plan.num_to_forward_prefetch, plan.num_to_backward_prefetch) > inner > 0:
        notes.append(f"{name or 'model'}: prefetch clamped to its {inner} inner units")
    shards = device_mesh.size() // replicas
    layout = f"{shards} shards" + (f" × {replicas} replicas" if replicas > 1 else "")
    return SubModelReport(name, layout, reshard, offload, forward, backward)


def _shard(sub_model: SubModel, plan: FSDPPlan, *, mesh: DeviceMesh, reshard: bool | int, offload: bool) -> None:
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=accelerator() is not None)
    for unit in reversed(sub_model.units):  # inner before outer: a unit takes the parameters that none inside it has
        is_root = unit.module is sub_model.module
        fully_shard(
            unit.module,
            mesh=mesh,
            # A root that isn't resharded after its forward waits for its backward, and a frozen one has none.
            reshard_after_forward=True if is_root and not sub_model.trainable else reshard,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=_DTYPES[plan.param_dtype],
                reduce_dtype=_DTYPES[plan.reduce_dtype],
                output_dtype=_DTYPES[plan.output_dtype] if is_root else None,
                # FSDP2 would cast every floating-point input, at every unit: in bf16 a timestep of 731 becomes 732.
                cast_forward_inputs=False,
            ),
            offload_policy=offload_policy,
            # Ignored modules' parameters, and ties that an outer unit owns: FSDP2 would take both.
            ignored_params=set(unit.module.parameters()) - set(unit.parameters.values()),
        )


def _set_prefetch(sub_model: SubModel, count: int, *, backward: bool) -> dict[str, list[str]]:
    """Tell each unit which ones to gather ahead: the next ``count`` of its sub-model, never of another."""
    # FSDP2 sets up a root in its first forward; gathered this way before that, another root's units would raise.
    ahead = {}
    for index, unit in enumerate(sub_model.units):
        targets = [sub_model.units[i] for i in _next_units(index, len(sub_model.units), count, backward)]
        modules = [cast(FSDPModule, target.module) for target in targets]
        fsdp_module = cast(FSDPModule, unit.module)
        if backward:
            fsdp_module.set_modules_to_backward_prefetch(modules)
        else:
            fsdp_module.set_modules_to_forward_prefetch(modules)
        ahead[unit.name] = [target.name for target in targets]
    return ahead


def _next_units(index: int, units: int, count: int, backward: bool) -> list[int]:
    """The units run 0 (the root), 1, 2, … in the forward, and 0, last, last - 1, … in the backward."""
    if not backward:
        return list(range(index + 1, min(index + 1 + count, units)))
    start = units if index == 0 else index
    return list(range(start - 1, max(start - 1 - count, 0), -1))


def _cast_in_forward(sub_model: SubModel, plan: FSDPPlan) -> None:
    dtype = _DTYPES[plan.param_dtype]
    if dtype is not None:
        modules = {unit.module for unit in sub_model.units}
        ours = {parameter for unit in sub_model.units for parameter in unit.parameters.values()}
        for module in modules:
            slots = [slot for slot in _slots(module, modules) if slot[0]._parameters[slot[1]] in ours]
            if slots:
                cast_parameters_in_forward(module, slots, dtype)
    output_dtype = _DTYPES[plan.output_dtype]
    if output_dtype is not None:
        cast_outputs(sub_model.module, output_dtype)


def _slots(module: nn.Module, unit_modules: set[nn.Module]) -> Iterator[Slot]:
    """(module, attribute) of every parameter below ``module`` down to the next units."""
    for name in module._parameters:
        yield module, name
    for child in module.children():
        if child not in unit_modules:
            yield from _slots(child, unit_modules)


def _check_cpu_backend(name: str) -> None:
    """Gradients of offloaded parameters are CPU tensors; reducing their norm takes a CPU backend."""
    backends = dist.get_backend_config()
    if "cpu:" not in backends:
        raise PlanError(
            f"cpu_offload of {name or 'the model'}",
            f"the process group has no backend for CPU tensors ({backends}); "
            "start it with the backend that mm_parallel.process_group_backend() returns",
        )
