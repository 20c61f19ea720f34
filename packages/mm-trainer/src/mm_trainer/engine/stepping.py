"""Which sub-models an optimizer step trains, where a container alternates between several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from mm_trainer.contracts.container import ModelContainer
from mm_trainer.errors import TrainingFault


class Stepping:
    """Asks the container, and makes sure that all ranks got the same answer.

    Ranks that train different sub-models in one step mix shards of two models, and no collective complains. So where
    there is a choice, the answer is compared on the host (one small all-reduce a step, which waits for no device).

    Args:
        container: None, or one that trains the same in every step: there is no choice.
    """

    def __init__(self, container: ModelContainer | None = None) -> None:
        self._container = container
        self.alternates = container is not None and len(container.validation_views()) > 1

    def begin(self, step: int, optimizers: Sequence[str]) -> tuple[str, ...]:
        """Make the choice for the step after ``step`` finished ones; called on all ranks.

        Args:
            optimizers: names of the sub-models that have one.

        Returns:
            those that this step trains.

        Raises:
            TrainingFault: the ranks disagree.
        """
        if self._container is None or not self.alternates:
            return tuple(optimizers)
        chosen = tuple(self._container.activate_for_step(step))
        bits = sum(1 << optimizers.index(name) for name in chosen)
        if dist.is_initialized():
            bounds = torch.tensor([bits, -bits])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
            if bounds[0] != -bounds[1]:
                raise TrainingFault(f"step {step + 1}: the ranks disagree on which sub-model it trains; here: {chosen}")
        return chosen

    def views(self) -> Iterator[str]:
        """What to validate one after the other, each made current in turn; one empty name where there is no choice."""
        if self._container is None or not self.alternates:
            yield ""
            return
        for name in self._container.validation_views():
            self._container.activate(name)
            yield name
