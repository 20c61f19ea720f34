"""What `mm-trainer sample` asks of a model family."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mm_trainer.contracts.options import TakesOptions
from mm_trainer.contracts.spec import OptionsT


@dataclass(frozen=True)
class SampleRequest:
    """One clip to make; what is None is the model's released setting."""

    prompt: str
    height: int
    width: int
    frames: int
    negative_prompt: str = ""
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    image: Path | None = None
    """First frame, for models that take one."""
    last_image: Path | None = None
    """Last frame, for models that take one."""


class Sampler(TakesOptions[OptionsT]):
    """Makes clips from a pipeline folder; a container, or a model without one, names its class.

    Its type argument, as in ``Sampler[MyOptions]``, says what `mm-trainer sample --option KEY=VALUE` may set; the
    docstrings of the fields are shown by ``--options``.

    Args:
        folder: a complete pipeline, such as an exported one; of a model without a container also that model's own
            folder, where no pipeline is named.
        dtype: fp32, bf16 or fp16, of the large models.
        device: where to compute.
        options: settings that only this family has, an instance of its options class.
    """

    @abstractmethod
    def __init__(self, folder: Path, *, dtype: str, device: str, options: OptionsT) -> None: ...

    @property
    @abstractmethod
    def fps(self) -> int:
        """Frames per second that the model was trained at."""

    @abstractmethod
    def __call__(self, request: SampleRequest) -> Tensor:
        """(3, frames, height, width) float32 in [0, 1], on the CPU.

        Raises:
            InputError: the request doesn't fit the model.
        """
