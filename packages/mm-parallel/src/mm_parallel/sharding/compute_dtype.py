"""FSDP2's dtype policy without FSDP2: fp32 parameters, a forward in another dtype.

One rank shards nothing, and FSDP2's hooks would only cost it time; but the same plan must compute the same numbers.
Each unit's forward therefore runs with casts in place of its parameters, and the gradients accumulated in the casts
are added to the parameters' own, in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mm_parallel.activations.forward_layers import Forward, Layer, add_layer

Slot = tuple[nn.Module, str]


def cast_parameters_in_forward(module: nn.Module, slots: Iterable[Slot], dtype: torch.dtype) -> None:
    """While ``module``'s forward runs, the parameters in ``slots`` are ``dtype``.

    Args:
        module: the unit.
        slots: (module, attribute) of every parameter to cast; those that already have ``dtype``, or aren't
            floating-point, stay as they are.
        dtype: of the forward.
    """
    add_layer(module, Layer.CAST, partial(_with_casts, slots=tuple(slots), dtype=dtype))


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point tensors that ``module`` returns."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module.register_forward_hook(lambda _module, _args, output: tree_map_only(torch.Tensor, cast, output))


def _with_casts(forward: Forward, *, slots: tuple[Slot, ...], dtype: torch.dtype) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _casts_in_place(slots, dtype):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _casts_in_place(slots: tuple[Slot, ...], dtype: torch.dtype) -> Iterator[None]:
    masters = []
    casts: dict[nn.Parameter, nn.Parameter] = {}
    for module, name in slots:
        master = module._parameters[name]
        if master is None or not master.is_floating_point() or master.dtype == dtype:
            continue
        if master not in casts:  # one cast for all names of a tied parameter, where their gradients add up
            casts[master] = _cast(master, dtype)
        masters.append((module, name, master))
        module._parameters[name] = casts[master]
    try:
        yield
    finally:
        for module, name, master in masters:
            module._parameters[name] = master


def _cast(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    # A leaf parameter, like FSDP2's gathered ones, so that activation offload can tell it from an activation.
    cast = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    if master.requires_grad:
        cast.register_post_accumulate_grad_hook(_hand_gradient_to(master))
    return cast


def _hand_gradient_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def hand_over(cast: torch.Tensor) -> None:
        gradient = cast.grad
        if gradient is None:
            return
        cast.grad = None  # or a second backward through it would hand it over again
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient.to(master.dtype)

    return hand_over
