"""Which sub-models an optimizer step trains, where a container alternates between several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from mm_trainer.contracts.alternation import Alternation
from mm_trainer.errors import TrainingFault


class Stepping:
    """Asks the container's alternation, and makes sure that all ranks got the same answer.

    Ranks that train different sub-models in one step mix shards of two models, and no collective complains. Where
    there is a choice, the answer is compared on the host (one small all-reduce a step, which waits for no device).

    Args:
        alternation: None: every step trains all there is, and there is one validation.
    """

    def __init__(self, alternation: Alternation | None = None) -> None:
        self._alternation = alternation
        self.alternates = alternation is not None

    def begin(self, step: int, optimizers: Sequence[str]) -> tuple[str, ...]:
        """Make the choice for the step after ``step`` finished ones; called on all ranks.

        Args:
            optimizers: names of the sub-models that have one.

        Returns:
            those that this step trains.

        Raises:
            TrainingFault: the ranks disagree, or the choice is empty or names a sub-model without an optimizer.
        """
        if self._alternation is None:
            return tuple(optimizers)
        chosen = tuple(self._alternation.begin(step))
        known = [name for name in chosen if name in optimizers]
        # An invalid choice gets a bit of its own: its rank raises after the comparison, so no other rank waits for it.
        bits = sum(1 << optimizers.index(name) for name in set(known)) + ((len(known) < len(chosen)) << len(optimizers))
        if dist.is_initialized():
            # One MAX gives both bounds: the largest of -bits is minus the smallest of bits.
            bounds = torch.tensor([bits, -bits])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
            if bounds[0] != -bounds[1]:
                raise TrainingFault(f"step {step + 1}: the ranks disagree on which sub-model it trains; here: {chosen}")
        if not chosen or len(known) < len(chosen):
            raise TrainingFault(
                f"step {step + 1}: the container's alternation wants to train {chosen or 'nothing'}; "
                f"what can be trained: {', '.join(optimizers)}"
            )
        return chosen

    def views(self) -> Iterator[str]:
        """What to validate one after the other, each made current in turn; one empty name where there is no choice."""
        if self._alternation is None:
            yield ""
        else:
            yield from self._alternation.views()
