"""What goes into the model and what comes out of it, checked where a plugin's mistake would otherwise train wrongly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mm_trainer import registry
from mm_trainer.contracts.pipeline import ModelOutput
from mm_trainer.errors import InputError


def own_class(model: nn.Module) -> Any:
    """The model's class; FSDP2 puts one of its own before it."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


class Forward:
    """Calls a model on batches; its output becomes a `ModelOutput` inside its own hooks.

    FSDP2's hook on a root looks for tensors in what the forward returns, and finds none in an object of an unknown
    type: the backward would then reduce nothing. So ours comes first.

    Args:
        model: any module whose ``model(**batch)`` returns an object with ``.loss``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._called = model, False
        model.register_forward_hook(self._convert, prepend=True)

    def __call__(self, batch: Mapping[str, Any]) -> ModelOutput:
        """Run the model.

        Raises:
            InputError: the model doesn't take the batch, or returns something else than a loss that can be trained;
                it names the model's distribution and class.
        """
        first, self._called = not self._called, True
        if first:
            self._check_taken(batch)
        try:
            output: ModelOutput = self._model(**batch)
        except KeyError as error:
            if not first or not error.args or error.args[0] in batch:
                raise
            raise InputError(
                f"{registry.origin(self._model)}: its forward looks for {error.args[0]!r}, which is nowhere; the "
                f"batch has: {', '.join(sorted(batch))}"
            ) from error
        return output

    def _check_taken(self, batch: Mapping[str, Any]) -> None:
        """Whether the forward has a parameter for every entry, and gets all that it must have."""
        kind = own_class(self._model)
        try:
            inspect.signature(kind.forward).bind(self._model, **batch)  # of the class: features replace the module's
        except TypeError as error:
            raise InputError(
                f"{registry.origin(kind)}: its forward can't be called with the batch: {error} (the batch has: "
                f"{', '.join(sorted(batch))}; a parameter **rest takes what isn't used)"
            ) from error

    def _convert(self, module: nn.Module, args: Any, output: Any) -> ModelOutput:
        try:
            converted = ModelOutput.of(output)
            if torch.is_grad_enabled() and not converted.loss.requires_grad:
                raise InputError(
                    "the loss doesn't depend on any trained parameter: it was detached, or computed without gradients"
                )
        except InputError as error:
            raise InputError(f"{registry.origin(own_class(module))}: {error}") from error
        return converted
