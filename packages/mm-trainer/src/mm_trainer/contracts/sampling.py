"""What `mm-trainer sample` asks of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


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
    guidance_low: float | None = None
    """Of the low-noise expert, where there are two."""
    seed: int = 0
    image: Path | None = None
    """First frame, for models that take one."""
    last_image: Path | None = None
    """Last frame, for models that take one."""


class Sampler(Protocol):
    """Makes clips from a pipeline folder."""

    @property
    def fps(self) -> int:
        """Frames per second that the model was trained at."""
        ...

    def __call__(self, request: SampleRequest) -> Tensor:
        """(3, frames, height, width) float32 in [0, 1], on the CPU.

        Raises:
            InputError: the request doesn't fit the model.
        """
        ...
