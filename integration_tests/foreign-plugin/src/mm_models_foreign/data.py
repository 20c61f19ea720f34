"""Data sets without files; they augment with generators that know nothing of mm-trainer, as many do."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_trainer.contracts import DatasetContext, Options


class NumberedOptions(Options):
    """Keys of ``data.dataset_param``."""

    samples: int = 24


class _Numbered:
    """What both have in common."""

    Options = NumberedOptions

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        self.samples = self.Options.model_validate(config).samples

    def __len__(self) -> int:
        return self.samples

    def bucket(self, index: int) -> Hashable:
        return 0

    def tokens(self, index: int) -> int:
        return 12


class Tokens(_Numbered):
    """Counting sequences; each starts somewhere else every time."""

    def load(self, index: int, sample_key: int) -> dict[str, Tensor]:
        start = random.randrange(8)
        return {"ids": (start + (1 + index % 4) * torch.arange(12)) % 64}


class Images(_Numbered):
    """A bright square, mirrored now and then, a little noise; and a caption that names its colour."""

    def load(self, index: int, sample_key: int) -> dict[str, Tensor]:
        image = -torch.ones(3, 8, 8)
        image[index % 3, 2:5, index % 6 : index % 6 + 2] = 1
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        image += 0.01 * torch.from_numpy(np.random.standard_normal((3, 8, 8))).float()
        return {"image": image, "prompt_ids": torch.tensor([2 + index % 3, 5, 1, 0])}
