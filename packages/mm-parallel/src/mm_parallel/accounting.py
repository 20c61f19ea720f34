"""Counting what a piece of code sends: collectives and bytes, by kind and mesh axis.

[Note: Bytes on the wire] Bytes are logical: what one rank must send, whatever algorithm the backend uses. With n
ranks in the group and b bytes per rank:

==============  ========================================  =====================
kind            b                                         counted
==============  ========================================  =====================
all_gather      this rank's part                          (n - 1) × b
reduce_scatter  the input, all n parts                    (n - 1) / n × b
all_reduce      the tensor                                2 × (n - 1) / n × b
all_to_all      the input, all n parts                    (n - 1) / n × b
send            the message                               b
broadcast       the tensor                                (n - 1) / n × b
==============  ========================================  =====================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mm_parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Traffic:
    """Collective calls, and the bytes that this rank sent in them."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)


class Communication:
    """What was counted: ``by[kind, axis]``, and sums over either."""

    def __init__(self) -> None:
        self.by: dict[tuple[str, str], Traffic] = {}

    def total(self, *, kind: str | None = None, axis: str | None = None) -> Traffic:
        """The sum over everything of this kind and axis; None stands for all."""
        chosen = [t for (k, a), t in self.by.items() if kind in (None, k) and axis in (None, *a.split("+"))]
        return sum(chosen, Traffic())

    def add(self, kind: str, axis: str, sent: int) -> None:
        """Count one call."""
        self.by[kind, axis] = self.by.get((kind, axis), Traffic()) + Traffic(1, sent)

    def __str__(self) -> str:
        rows = [
            f"{kind:<15}{axis:<11}{t.calls:>7} calls {t.bytes:>16,} bytes"
            for (kind, axis), t in sorted(self.by.items())
        ]
        return "\n".join(rows) or "no communication"


@contextmanager
def count_communication(mesh: ParallelMesh | None = None) -> Iterator[Communication]:
    """Count every collective and send that this rank issues inside, backward passes included.

    Meanwhile every operator passes through Python: use it for tests, plans and a sampled step, not for every step.

    Args:
        mesh: names the axes (``shard``, ``replicate``, ``ulysses``, ``ring``, ``context``; ``a+b`` if two of them are
            the same ranks); groups that it doesn't know are ``other``.
    """
    counted = Communication()
    with _Counter(counted, mesh.axes() if mesh else {}):
        yield counted


class _Counter(TorchDispatchMode):
    def __init__(self, counted: Communication, axes: dict[str, str]) -> None:
        super().__init__()
        self._counted = counted
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        found = _KINDS.get(func.overloadpacket.__name__)
        if found is None:
            return
        kind, position = found
        group = _group(args)
        sent = _SENT[kind](_nbytes(args[position]), group.size())
        self._counted.add(kind, self._axes.get(group.group_name, "other"), sent)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_nbytes(tensor) for tensor in tensors)


# Operator → (kind, which argument is this rank's payload).
_KINDS = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "send": ("send", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
}

_SENT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda payload, n: (n - 1) * payload,
    "reduce_scatter": lambda payload, n: (n - 1) * payload // n,
    "all_reduce": lambda payload, n: 2 * (n - 1) * payload // n,
    "all_to_all": lambda payload, n: (n - 1) * payload // n,
    "send": lambda payload, n: payload,
    "broadcast": lambda payload, n: (n - 1) * payload // n,
}
