"""What the engine lends the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn

from mm_parallel import prefetch


def _untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class StepContext:
    """Passed to every stage of a pipeline, which keeps nothing of it."""

    phase: Callable[[str], AbstractContextManager[None]] = _untimed
    """Charges the block inside to a named part of the step, for the logs."""
    cross_submodel_prefetch: bool = False
    """``parallel.fsdp_plan.cross_submodel_prefetch``."""
    inside_forward: bool = False
    """The trained model's forward follows before the next optimizer step. `GenerativePipeline.forward` sets it."""

    def prefetch(self, model: nn.Module) -> None:
        """Start gathering what ``model`` needs first, to be called before the sub-model that runs ahead of it.

        Does nothing unless the configuration asks for it. A trained model is gathered only inside the forward that uses
        it: gathered before an optimizer step, its weights would silently be stale after it.
        """
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if self.cross_submodel_prefetch and (self.inside_forward or not trained):
            prefetch(model)
