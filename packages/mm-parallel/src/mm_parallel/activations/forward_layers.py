"""Functions around a module's forward, in one fixed order, whatever order they are added in.

[Note: Forward layers] From the inside out: compile → cast → recompute → offload. Compiling anything but the inner
forward silently compiles nothing; offloading tensors inside a recomputed region would silently switch the
recomputation off; a cast outside it would be missing when the forward runs again in the backward. FSDP2's own hooks
run in ``__call__`` and therefore stay outside all of them. The forward is replaced on the instance, without a wrapper
module in between: parameter names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import update_wrapper
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class Layer(IntEnum):
    """What may surround a forward, innermost first."""

    COMPILE = 0
    CAST = 1
    RECOMPUTE = 2
    OFFLOAD = 3


class LayeredForward:
    """A module's forward with its layers; calling it runs them all."""

    def __init__(self, inner: Forward) -> None:
        update_wrapper(self, inner)  # callers may inspect the signature
        self._inner = inner
        self._layers: dict[Layer, Callable[[Forward], Forward]] = {}
        self._composed = inner

    def add(self, layer: Layer, wrap: Callable[[Forward], Forward]) -> None:
        """Surround the forward with ``wrap``, at the place of ``layer``."""
        if layer in self._layers:
            raise ValueError(f"the forward already has a layer {layer.name}")
        self._layers[layer] = wrap
        self._composed = self._inner
        for key in sorted(self._layers):
            self._composed = self._layers[key](self._composed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._composed(*args, **kwargs)


def add_layer(module: nn.Module, layer: Layer, wrap: Callable[[Forward], Forward]) -> None:
    """Put ``wrap`` around ``module.forward``, at the place of ``layer``.

    Raises:
        ValueError: the module has this layer already.
    """
    if not isinstance(module.forward, LayeredForward):
        module.forward = LayeredForward(module.forward)
    module.forward.add(layer, wrap)
