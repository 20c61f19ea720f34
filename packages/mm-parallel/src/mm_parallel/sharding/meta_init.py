"""Parameters without memory, and memory for them later.

[Note: Build order] The order that every function of this package assumes: build with parameters on meta → freeze →
``apply_features`` (replaces forwards, innermost first) → ``parallelize`` (the sharded layout exists) →
``materialize`` (only now memory, one shard's worth) → weights stream into the local shards → optimizer. Buffers are
real from the start and keep their values: tables that a constructor computes are in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from mm_parallel.sharding.fsdp_state import offloaded_parameters
from mm_parallel.sharding.unwritten import mark


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on meta and real buffers; ties survive.

    (``torch.device("meta")`` would put the buffers on meta too, and lose what the constructor computed.) Patches
    ``nn.Module.register_parameter`` while it is active, in this process.
    """
    original = nn.Module.register_parameter
    on_meta = WeakIdKeyDictionary()

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            # The same parameter registered twice is a tie: both names get the same meta tensor.
            if param not in on_meta:
                on_meta[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param = on_meta[param]
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give every meta tensor of ``module`` memory on ``device``, and move the real plain ones there.

    Former meta tensors hold a mark until they are loaded or initialised, see `find_unwritten`; real ones keep their
    values.
    Sharded parameters get one shard's worth, on the CPU if their unit is offloaded. Ties survive. Call after
    ``parallelize``.

    Args:
        module: its parameters and buffers are replaced in place.
        device: where to.
    """
    device = torch.device(device)
    moved: dict[int, torch.Tensor] = {}  # by identity: a tied tensor stays one tensor
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, DTensor):
                    if id(tensor) not in moved:
                        moved[id(tensor)] = _on_device(tensor, device)
                    tensors[name] = moved[id(tensor)]  # type: ignore[assignment]
    offloaded = {id(parameter) for parameter in offloaded_parameters(module)}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not (isinstance(tensor, DTensor) and tensor.is_meta):
            return tensor
        return mark(torch.empty_like(tensor, device="cpu" if id(tensor) in offloaded else device))

    # FSDP2 must learn about its parameters' new storage; its own `_apply` takes care of that.
    module._apply(with_memory)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    with torch.no_grad():
        there = mark(torch.empty_like(tensor, device=device)) if tensor.is_meta else tensor.to(device)
    if not isinstance(tensor, nn.Parameter):
        return there
    parameter = nn.Parameter(there, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # attributes that others have set on it
    return parameter
