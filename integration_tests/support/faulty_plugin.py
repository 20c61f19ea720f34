"""`training.plugin: [faulty_plugin]`: the toy's data set and container, with a fault on rank 1 where ``FAULT`` says."""

from __future__ import annotations

import os
from typing import Any

from mm_models_toy.container import ToyContainer
from mm_models_toy.dataset import MovingSquares
from torch import Tensor

from mm_trainer.contracts import ModelOutput
from mm_trainer.registry import register_container, register_dataset

FAULT = os.environ.get("FAULT")
ON_RANK_1 = os.environ.get("RANK") == "1"


@register_dataset("faulty_squares")
class FaultySquares(MovingSquares):
    """Fails in a worker when the fifth sample of the order comes up."""

    def load(self, index: int, sample_key: int) -> dict[str, Tensor]:
        if FAULT == "data" and ON_RANK_1 and sample_key >= 4:
            raise RuntimeError("a fault in the data set")
        return super().load(index, sample_key)


@register_container("faulty_container")
class FaultyContainer(ToyContainer):
    """Fails in the second forward, or in the first save."""

    forwards = 0

    def forward(self, **batch: Any) -> ModelOutput:
        self.forwards += 1
        if FAULT == "forward" and ON_RANK_1 and self.forwards == 2:
            raise RuntimeError("a fault in the forward")
        return super().forward(**batch)

    def state_dict(self, *args: Any, **policies: Any) -> Any:
        if FAULT == "save" and ON_RANK_1 and self.forwards:
            raise RuntimeError("a fault in the save")
        return super().state_dict(*args, **policies)
