"""Noise schedules that Wan2.2 is trained with: presets, loss weights, and the noise range of an expert.

The numbers are a contract, pinned by golden tests: fine-tunes are only comparable if everybody draws from one grid.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mm_trainer.contracts import Options
from mm_trainer.pipelines.flow_match import TIMESTEP_SCALE
from mm_trainer.pipelines.schedule import (
    ContinuousSchedule,
    GridSchedule,
    NoiseRange,
    NoiseSchedule,
    check_noise_range,
    shift_sigma,
)

Preset = Literal["wan", "shift5", "uniform", "logit_normal"]

GRID_POINTS = 1000
DEFAULT_SHIFT: dict[str, float] = {"wan": 3.0, "shift5": 5.0, "uniform": 1.0, "logit_normal": 1.0}
SIGMA_MIN = 0.003 / 1.002
"""Smallest unshifted σ of the ``wan`` grid."""

# Index fractions of the shift5 grid that other tools state where the σ they mean is the value.
_INDEX_FRACTIONS = {0.417: 0.875, 0.358: 0.9}


class WanSchedulerOptions(Options):
    """``model.scheduler``."""

    preset: Preset = "wan"
    shift: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """σ' = s·σ / (1 + (s − 1)·σ); by default 3 for ``wan``, 5 for ``shift5`` and 1 (none) for the continuous ones."""
    mean: float = Field(default=0.0, allow_inf_nan=False)
    std: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> WanSchedulerOptions:
        if self.preset == "shift5" and self.shift not in (None, 5.0):
            raise ValueError(f"preset shift5 has shift 5, got shift {self.shift}; leave it out or choose preset wan")
        if self.preset != "logit_normal" and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError(f"mean and std belong to preset logit_normal, got preset {self.preset}")
        return self

    @property
    def effective_shift(self) -> float:
        return DEFAULT_SHIFT[self.preset] if self.shift is None else self.shift


def bell_weights(sigmas: Tensor) -> Tensor:
    """Loss weights over a grid: a bell around t = 500, lowered to a minimum of 0, with mean 1 over the whole grid."""
    bell = torch.exp(-2 * ((TIMESTEP_SCALE * sigmas - 500) / 1000) ** 2)
    bell = bell - bell.min()
    return bell / bell.mean()


def base_grid(preset: Literal["wan", "shift5"]) -> Tensor:
    """Unshifted σ, (1000,) float64, descending from 1."""
    if preset == "wan":
        return torch.linspace(1, SIGMA_MIN, GRID_POINTS, dtype=torch.float64)
    return torch.linspace(1, 0, GRID_POINTS + 1, dtype=torch.float64)[:-1]


def build_schedule(options: WanSchedulerOptions, noise_range: NoiseRange = (0.0, 1.0)) -> NoiseSchedule:
    """The schedule that the options name, truncated to ``noise_range`` after the shift."""
    shift = options.effective_shift
    if options.preset == "uniform" or options.preset == "logit_normal":
        return ContinuousSchedule(
            options.preset, shift=shift, mean=options.mean, std=options.std, noise_range=noise_range
        )
    sigmas = shift_sigma(base_grid(options.preset), shift)
    label: dict[str, Any] = {"preset": options.preset, "shift": shift}
    return GridSchedule(sigmas, bell_weights(sigmas), noise_range=noise_range, label=label)


def checked_range(noise_range: NoiseRange) -> NoiseRange:
    """Return a range that a user stated, or raise ValueError: not [lo, hi] in σ, or an index fraction."""
    for edge in noise_range:
        for fraction, sigma in _INDEX_FRACTIONS.items():
            if math.isclose(edge, fraction, abs_tol=6e-4):
                raise ValueError(
                    f"{edge} is not a sigma: other tools state {fraction} for the fraction of the shift5 grid's "
                    f"indices whose sigma is >= {sigma}; write {sigma}"
                )
    return check_noise_range(noise_range)


def expert_range(expert: Literal["high", "low"], boundary: float) -> NoiseRange:
    """σ of the high-noise expert: [boundary, 1]; of the low-noise one: [0, boundary)."""
    return (boundary, 1.0) if expert == "high" else (0.0, boundary)
