"""What a data set must offer; third parties register a factory under ``mm_trainer.datasets``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mm_trainer.contracts.spec import InputSpec


@dataclass(frozen=True)
class DatasetContext:
    """What the run tells a data set."""

    input_spec: InputSpec
    tokenizer: Callable[..., dict[str, Tensor]] | None
    """Picklable tokenise step of the text encoder (prompts → ids and mask), or None if the model reads no text."""
    seed: int


class MapDataset(Protocol):
    """A map-style data set. Order, balance, resume and worker processes are the framework's business."""

    def __len__(self) -> int: ...

    def bucket(self, index: int) -> Hashable:
        """Samples of equal bucket can be stacked into one micro-batch."""
        ...

    def tokens(self, index: int) -> int:
        """Cost of a sample, as the length of the sequence it becomes."""
        ...

    def load(self, index: int, sample_key: int) -> Mapping[str, Any]:
        """One sample as tensors (plain values are collated to tensors or lists).

        Images and clips are best left as bytes: in a batch, uint8 tensors of at least four dims, the last two height
        and width (so in a sample, of at least three), reach the model as float32 in [−1, 1]; see [Note: pixels] in
        `mm_trainer.data.batch`. All other tensors reach it as they are.

        Args:
            index: which sample.
            sample_key: its position in the global data order; all randomness (augmentation, caption dropout) is drawn
                from it with `mm_trainer.randomness.keyed_generator`.

        Raises:
            mm_trainer.errors.BadSample: this sample can't be used; the framework replaces it or stops, as configured.
        """
        ...


DatasetFactory = Callable[[Mapping[str, Any], DatasetContext], MapDataset]
"""(the ``dataset_param`` section as validated plain values, the context) → data set."""
