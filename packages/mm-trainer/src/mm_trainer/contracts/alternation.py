"""Who decides which sub-models a step trains, in a container that doesn't train all of them in every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Alternation(Protocol):
    """`ModelContainer.alternation`; the engine asks it before every step and at every validation."""

    def begin(self, step: int) -> Sequence[str]:
        """Choose what the optimizer step after ``step`` finished ones trains; forwards use it until the next call.

        The choice must be a function of (seed, step), so that all ranks and all micro-batches agree.

        Returns:
            names of the sub-models whose optimizers are stepped. Gradients that others received are dropped.
        """
        ...

    def views(self) -> Iterator[str]:
        """Names to validate one after the other, each current until the next one is asked for; a single empty name
        validates the container once, as it is."""
        ...
