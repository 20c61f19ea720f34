"""Gradient synchronisation is the model's business: a model that brings its own is asked, others get mm-parallel's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from mm_parallel import set_is_last_backward, set_requires_all_reduce, set_requires_gradient_sync
from mm_trainer.engine.forward import own_class


@runtime_checkable
class GradientSync(Protocol):
    """What a model is told before each micro-batch's forward. See [Note: Accumulation] in `mm_parallel`."""

    def set_is_last_backward(self, value: bool) -> None:
        """Whether the next backward ends the step."""
        ...

    def set_requires_gradient_sync(self, value: bool) -> None:
        """Whether the next backward reduces gradients."""
        ...

    def set_requires_all_reduce(self, value: bool) -> None:
        """Whether the next backward reduces them across replicas, where it reduces them at all."""
        ...


_METHODS = ("set_is_last_backward", "set_requires_gradient_sync", "set_requires_all_reduce")


def gradient_sync_of(model: nn.Module) -> GradientSync:
    """The model's own, if its class defines the three methods, else mm-parallel's.

    Raises:
        TypeError: its class defines some of the three.
    """
    kind = own_class(model)  # FSDP2's class has methods of these names, which are not the model's
    if issubclass(kind, GradientSync) and isinstance(model, GradientSync):
        return _Own(kind, model)
    missing = [name for name in _METHODS if name not in dir(kind)]
    # Falling back to mm-parallel's here would ignore the methods that the class does define.
    if len(missing) < len(_METHODS):
        raise TypeError(f"{kind.__qualname__} synchronises its gradients itself, but doesn't define {missing}")
    return _Default(model)


def announce(sync: GradientSync, *, is_last: bool, reduce_every_micro_step: bool) -> None:
    """Say, before a micro-batch's forward, whether its backward is the last of the step.

    Args:
        reduce_every_micro_step: see `mm_parallel.set_gradient_sync`, which does the same for mm-parallel's own.
    """
    sync.set_is_last_backward(is_last)
    sync.set_requires_gradient_sync(is_last or reduce_every_micro_step)
    # Reduced within the shards every time, across the replicas only once.
    if reduce_every_micro_step:
        sync.set_requires_all_reduce(is_last)


@dataclass(frozen=True)
class _Own:
    kind: type[GradientSync]
    model: GradientSync

    def set_is_last_backward(self, value: bool) -> None:
        self.kind.set_is_last_backward(self.model, value)

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.kind.set_requires_gradient_sync(self.model, value)

    def set_requires_all_reduce(self, value: bool) -> None:
        self.kind.set_requires_all_reduce(self.model, value)


@dataclass(frozen=True)
class _Default:
    model: nn.Module

    def set_is_last_backward(self, value: bool) -> None:
        set_is_last_backward(self.model, value)

    def set_requires_gradient_sync(self, value: bool) -> None:
        set_requires_gradient_sync(self.model, value)

    def set_requires_all_reduce(self, value: bool) -> None:
        set_requires_all_reduce(self.model, value)
