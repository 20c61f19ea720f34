"""The ranks of a run as one object, built once after ``init_process_group`` and passed as an argument.

Rank order: parameters see ``rank = replica × shard_size + shard``; the batch sees
``rank = (data × ring_size + ring) × ulysses_size + ulysses``, which makes ranks that exchange heads neighbours, and
ranks that share one sample contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mm_parallel.sizes import MeshSizes

if TYPE_CHECKING:
    from mm_parallel.attention.context import ContextParallel


def process_group_backend(device_type: str) -> str:
    """The backend argument of ``init_process_group``: the device's own, paired with one for CPU tensors.

    CPU tensors are reduced if parameters are offloaded, and gathered by asynchronous checkpoints.
    """
    backend = dist.get_default_backend_for_device(device_type)
    return backend if device_type == "cpu" else f"cpu:gloo,{device_type}:{backend}"


class ParallelMesh:
    """Which rank holds which shard, sample and part of the sequence."""

    def __init__(self, sizes: MeshSizes, device_type: str, rank: int) -> None:
        self.sizes = sizes
        self.device_type = device_type
        self.rank = rank
        self._fsdp_meshes: dict[int, DeviceMesh] = {}
        self._context_meshes = _context_meshes(sizes, device_type)

    @classmethod
    def build(cls, sizes: MeshSizes, device_type: str = "cpu") -> ParallelMesh:
        """Build the mesh; call on every rank, with the process group initialised (a single rank may do without).

        Args:
            sizes: must multiply to the world size.
            device_type: of the collectives and the parameters.

        Raises:
            RuntimeError: no process group, but more than one rank was asked for.
            ValueError: the world has another size.
        """
        if not dist.is_initialized():
            if sizes.world != 1:
                raise RuntimeError(f"a mesh of {sizes.world} ranks needs init_process_group first")
            return cls(sizes, device_type, 0)
        if dist.get_world_size() != sizes.world:
            raise ValueError(
                f"replicate × shard = {sizes.replicate} × {sizes.shard} = {sizes.world}, "
                f"but there are {dist.get_world_size()} ranks"
            )
        return cls(sizes, device_type, dist.get_rank())

    @property
    def device(self) -> torch.device:
        """This rank's device (the current one of its type: set it before anything is built)."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    @property
    def data_rank(self) -> int:
        """Which of ``data_size`` streams of samples this rank reads; equal among ranks that share one sample."""
        return self.rank // self.sizes.context

    @property
    def data_size(self) -> int:
        return self.sizes.data

    @property
    def context_rank(self) -> int:
        """Place among the ``context_size`` ranks that share one sample."""
        return self.rank % self.sizes.context

    @property
    def context_size(self) -> int:
        return self.sizes.context

    def fsdp(self, shard_size: int | None = None) -> DeviceMesh:
        """The mesh to shard parameters over: ``("shard",)``, or ``("replicate", "shard")`` where there are replicas.

        Made on first use (all ranks must ask in the same order) and kept: every new mesh costs process groups.

        Args:
            shard_size: ranks that share one copy; None is the global plan's.

        Raises:
            ValueError: it doesn't divide the world.
            RuntimeError: no process group (a single rank needs one too, once something is to be sharded).
        """
        if not dist.is_initialized():
            raise RuntimeError("sharding needs init_process_group first")
        shard = self.sizes.shard if shard_size is None else shard_size
        if self.sizes.world % shard:
            raise ValueError(f"a shard size of {shard} doesn't divide the {self.sizes.world} ranks")
        if shard not in self._fsdp_meshes:
            replicate = self.sizes.world // shard
            shape, names = ((shard,), ("shard",)) if replicate == 1 else ((replicate, shard), ("replicate", "shard"))
            self._fsdp_meshes[shard] = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        return self._fsdp_meshes[shard]

    def axes(self) -> dict[str, str]:
        """Process group name → mesh axis, of every group made so far; axes that share a group: ``context+shard``."""
        found: dict[str, set[str]] = {}
        for mesh in (*self._context_meshes.values(), *self._fsdp_meshes.values()):
            for axis in mesh.mesh_dim_names or ():
                group = mesh.get_group(axis)
                if group.size() > 1:
                    found.setdefault(group.group_name, set()).add(axis)
        return {group: "+".join(sorted(axes)) for group, axes in found.items()}

    def context_parallel(self, **policies: Any) -> ContextParallel:
        """The object that models split their sequences with.

        Args:
            policies: those of :class:`~mm_parallel.attention.context.ContextParallel`, such as ``kernel``.
        """
        from mm_parallel.attention.context import ContextParallel

        groups = {name: mesh.get_group(name) for name, mesh in self._context_meshes.items()}
        return ContextParallel(
            group=groups.get("context"), ulysses=groups.get("ulysses"), ring=groups.get("ring"), **policies
        )


def _context_meshes(sizes: MeshSizes, device_type: str) -> dict[str, DeviceMesh]:
    """For each kind of context-parallel group with more than one rank, a mesh with an axis of that name."""
    if sizes.context == 1:
        return {}
    outer = init_device_mesh(device_type, (sizes.data, sizes.context), mesh_dim_names=("data", "context"))
    inner = init_device_mesh(
        device_type, (sizes.data, sizes.ring, sizes.ulysses), mesh_dim_names=("data", "ring", "ulysses")
    )
    return {"context": outer} | {name: inner for name in ("ring", "ulysses") if getattr(sizes, name) > 1}
