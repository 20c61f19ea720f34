"""What a configuration may say of Wan2.2 beyond what every model knows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mm_models_wan.schedule import WanSchedulerOptions, checked_range
from mm_trainer.contracts import Options as BaseOptions
from mm_trainer.errors import FieldError
from mm_trainer.pipelines.schedule import NoiseRange

TASKS = ("t2v", "i2v", "ti2v")

PREDICTORS = ("predictor", "predictor_2")
"""The trained sub-models; the second one only with ``expert: both``, where they are the high- and low-noise expert."""


class Wan22Options(BaseOptions):
    """Keys of ``model`` that only this container knows."""

    expert: Literal["high", "low", "both"] | None = None
    """Which expert is trained; its noise range ends at the model's own boundary. ``both``: two predictors, one of them
    drawn for every optimizer step."""
    boundary: float | None = Field(default=None, gt=0, lt=1)
    """σ where the experts meet; by default what the weights' ``model_index.json`` or the architecture says."""
    noise_range: NoiseRange | None = None
    """[lo, hi] in σ, instead of ``expert``."""
    scheduler: WanSchedulerOptions = WanSchedulerOptions()
    last_frame: bool = False
    """Task i2v: the last frame is given as well as the first."""

    @field_validator("noise_range")
    @classmethod
    def _check_range(cls, value: NoiseRange | None) -> NoiseRange | None:
        return None if value is None else checked_range(value)

    @field_validator("boundary")
    @classmethod
    def _check_boundary(cls, value: float | None) -> float | None:
        return None if value is None else checked_range((value, 1.0))[0]

    @model_validator(mode="after")
    def _check_expert(self) -> Wan22Options:
        if self.expert is not None and self.noise_range is not None:
            raise ValueError("expert and noise_range both state the noise range; give one of them")
        if self.boundary is not None and self.expert is None:
            raise FieldError("boundary", "only read with expert (high, low or both), which isn't given")
        return self
