"""Whether training reaches what it is meant to train, found out in the first step instead of never."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mm_trainer.errors import TrainingFault
from mm_trainer.optim.optimizers import NamedOptimizer

log = logging.getLogger(__name__)

_LISTED = 5


class GradientCoverage:
    """Looks once at every sub-model, in the first step that trains it, between its backward and its update.

    A model whose loss is detached from its parameters, or whose output FSDP2's hooks didn't recognise, otherwise runs
    to the end with a gradient norm of 0. No tensor is read, so the host waits for nothing.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, trained: Sequence[str], optimizers: Mapping[str, NamedOptimizer]) -> None:
        """Look at the sub-models of this step that weren't looked at before.

        Raises:
            TrainingFault: none of a sub-model's parameters received a gradient.
        """
        for name in trained:
            if name in self._seen:
                continue
            self._seen.add(name)
            names = optimizers[name].names
            without = sorted(full for parameter, full in names.items() if parameter.grad is None)
            if not without:
                continue
            listed = f"{', '.join(without[:_LISTED])}{', …' if len(without) > _LISTED else ''}"
            if len(without) == len(names):
                raise TrainingFault(
                    f"none of the {len(names)} trained parameters of {name or 'the model'} received a gradient in its "
                    f"first step ({listed}): is the loss detached from them, or the sub-model not called?"
                )
            log.warning("%d of %d parameters received no gradient: %s", len(without), len(names), listed)
