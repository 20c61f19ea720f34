"""An exponential moving average of the trainable weights, sharded like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mm_trainer.optim.shards import local


class WeightAverage:
    """ema ← decay·ema + (1 − decay)·weight, after every optimizer step; kept in float32.

    Args:
        parameters: full name → trainable parameter, plain or sharded.
        decay: in [0, 1).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"an EMA's decay must be in [0, 1), got {decay}")
        self.decay = decay
        self._parameters = dict(parameters)
        self.average: dict[str, Tensor] = {n: p.detach().float().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, sub_models: Sequence[str] | None = None, *, skipped: Tensor | None = None) -> None:
        """Take the current weights in; sharded tensors are updated shard by shard, with no communication.

        Args:
            skipped: 0-dim float on the device; 1 where the step's update was left out, and so is this one.
            sub_models: only parameters of these, by the first part of their names; None, or an empty name: all. The
                average of a sub-model that a step didn't train stays unchanged.
        """
        names = list(self._parameters)
        if sub_models is not None and "" not in sub_models:
            names = [name for name in names if name.split(".", 1)[0] in sub_models]
        averages = [local(self.average[name]) for name in names]
        weights = [local(self._parameters[name]).float() for name in names]
        if skipped is None:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
            return
        steps = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(steps, (1 - self.decay) * (1 - skipped))
        torch._foreach_add_(averages, steps)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the current weights."""
        for name, parameter in self._parameters.items():
            local(self.average[name]).copy_(local(parameter))

    def state(self) -> dict[str, Tensor]:
        """Full name → average, to be saved, or filled in place by a load."""
        return self.average
