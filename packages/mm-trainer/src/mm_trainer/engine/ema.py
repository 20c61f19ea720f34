"""An exponential moving average of the trainable weights, sharded like them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightAverage:
    """ema ← decay·ema + (1 − decay)·weight, after every optimizer step; kept in float32.

    Args:
        parameters: full name → trainable parameter, plain or sharded.
        decay: in [0, 1).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"an EMA's decay lies in [0, 1), got {decay}")
        self.decay = decay
        self._parameters = dict(parameters)
        self.average: dict[str, Tensor] = {n: p.detach().float().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights in; sharded tensors are updated shard by shard, with no communication."""
        averages = [_local(tensor) for tensor in self.average.values()]
        weights = [_local(parameter).float() for parameter in self._parameters.values()]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """Full name → average, to be saved, or filled in place by a load."""
        return self.average


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
