"""`Wan22Container`: the VAE, the text encoder and one or two experts under one roof."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mm_models_wan.schedule import WanSchedulerOptions, checked_range
from mm_trainer.contracts import ModelContainer, ModelSpec, Options
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.schedule import NoiseRange

logger = logging.getLogger(__name__)

TASKS = ("t2v", "i2v", "ti2v")


class Wan22Options(Options):
    """Keys of ``model`` that only this container knows."""

    expert: Literal["high", "low"] | None = None
    """Which expert is trained; its noise range ends at the model's own boundary."""
    boundary: float | None = Field(default=None, gt=0, lt=1)
    """σ where the experts meet; by default what the weights' ``model_index.json`` or the architecture says."""
    noise_range: NoiseRange | None = None
    """[lo, hi] in σ, instead of ``expert``."""
    scheduler: WanSchedulerOptions = WanSchedulerOptions()

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
        return self


class Wan22Container(ModelContainer):
    """Roles ``ae``, ``text_encoder`` and ``predictor``."""

    Options = Wan22Options
    checkpoint_submodels: tuple[str, ...] = ("predictor",)
    pipeline_id: ClassVar[str | None] = "wan2_2"

    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: Options, task: str | None) -> None:
        roles = ("ae", "text_encoder", "predictor")
        missing = [role for role in roles if role not in specs]
        unknown = [name for name in specs if name not in roles]
        if missing or unknown:
            raise ConfigError(
                f"a Wan2.2 container has the sub-models {', '.join(roles)}; missing {missing}, unknown {unknown}",
                key="model.models",
            )
        if task not in TASKS:
            raise ConfigError(f"task {task!r} is not one of: {', '.join(TASKS)}", key="model.task")
