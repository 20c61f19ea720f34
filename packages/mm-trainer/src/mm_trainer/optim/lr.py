"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then constant, linear or cosine decay to a floor.

    Steps are optimizer steps, whatever the world size or the number of accumulated micro-batches. Nothing is stored in
    a checkpoint: the value follows from the step and the configuration, so a changed configuration takes effect on
    resume and nothing decays twice.

    Args:
        peak: the rate after warm-up.
        floor: the rate at the end of a decay.
        style: shape of the decay.
        warmup_steps: linear from ``peak / warmup_steps`` at step 0 to ``peak`` at step ``warmup_steps − 1``.
        total_steps: step at which the floor is reached.
    """

    peak: float
    floor: float
    style: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """The rate of the update that turns ``step`` finished updates into ``step + 1``."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        remaining = 1 - progress if self.style == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (self.peak - self.floor) * remaining
