"""Noise schedules of flow matching: from a uniform number to σ and its loss weight.

A schedule is an inverse distribution function, ascending in σ. Training feeds it uniform draws keyed by the sample,
validation feeds it fixed quantiles, and both see the same distribution. A noise range truncates the distribution
*after* the shift and keeps its shape: nothing is clamped (mass would pile up on the boundary), nothing is rescaled, and
weights are not renormalised inside the range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

NoiseRange = tuple[float, float]
"""(lo, hi) in σ: lo ≤ σ < hi, and σ = 1 belongs to a range that ends at 1."""


class NoiseLevel(NamedTuple):
    """What one sample is noised with."""

    sigma: Tensor
    """(B,) float32 in [0, 1]."""
    weight: Tensor
    """(B,) float32 loss weight."""


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """σ' = s·σ / (1 + (s − 1)·σ); keeps 0 and 1 fixed."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def check_noise_range(noise_range: NoiseRange) -> NoiseRange:
    """Return the range, or raise ValueError if it isn't 0 ≤ lo < hi ≤ 1."""
    lo, hi = noise_range
    if not 0 <= lo < hi <= 1:
        raise ValueError(f"a noise range is [lo, hi] with 0 <= lo < hi <= 1 in sigma, got [{lo}, {hi}]")
    return lo, hi


class NoiseSchedule(ABC):
    """Distribution of σ over a noise range, with loss weights."""

    noise_range: NoiseRange

    @abstractmethod
    def at(self, u: Tensor) -> NoiseLevel:
        """Inverse distribution function; ``u``: (B,) float64 in [0, 1), ascending in σ."""

    @abstractmethod
    def probability(self, noise_range: NoiseRange) -> float:
        """Mass of a range under the *untruncated* distribution."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain values for the log and the checkpoint."""


class GridSchedule(NoiseSchedule):
    """Uniform over the points of a discrete grid that lie in the range.

    Args:
        sigmas: (N,) float64, descending, shift applied.
        weights: (N,) float64 loss weights of the points.
        noise_range: which points to draw from.
        label: plain values that name the grid (preset, shift), for `describe`.
    """

    def __init__(
        self,
        sigmas: Tensor,
        weights: Tensor,
        *,
        noise_range: NoiseRange = (0.0, 1.0),
        label: Mapping[str, Any] | None = None,
    ) -> None:
        self.noise_range = check_noise_range(noise_range)
        self.sigmas, self.weights, self._label = sigmas.double(), weights.double(), dict(label or {})
        # Ascending, so that a quantile means the same for every kind of schedule.
        self._indices = self._inside(self.noise_range).nonzero().flatten().flip(0)
        if not len(self._indices):
            raise ValueError(f"no point of the noise grid lies in the range {list(self.noise_range)}")

    def _inside(self, noise_range: NoiseRange) -> Tensor:
        lo, hi = noise_range
        below = self.sigmas <= hi if hi == 1 else self.sigmas < hi
        return (self.sigmas >= lo) & below

    def at(self, u: Tensor) -> NoiseLevel:
        count = len(self._indices)
        index = self._indices[(u.double() * count).long().clamp(max=count - 1)]
        return NoiseLevel(self.sigmas[index].float(), self.weights[index].float())

    def probability(self, noise_range: NoiseRange) -> float:
        return float(self._inside(noise_range).double().mean())

    def describe(self) -> dict[str, Any]:
        chosen = self._indices
        return {
            **self._label,
            "points": len(self.sigmas),
            "points_in_range": len(chosen),
            "noise_range": list(self.noise_range),
            "sigma_min": float(self.sigmas[chosen].min()),
            "sigma_max": float(self.sigmas[chosen].max()),
            "mean_weight": float(self.weights[chosen].mean()),
        }


class ContinuousSchedule(NoiseSchedule):
    """A continuous base distribution of σ, shifted, truncated to the range; all weights are 1.

    Args:
        base: ``uniform`` on [0, 1], or ``logit_normal``: σ = sigmoid(N(mean, std²)).
        shift: see `shift_sigma`; applied to the base distribution once.
        mean, std: of the normal inside ``logit_normal``.
        noise_range: truncation, after the shift.
    """

    def __init__(
        self,
        base: Literal["uniform", "logit_normal"],
        *,
        shift: float = 1.0,
        mean: float = 0.0,
        std: float = 1.0,
        noise_range: NoiseRange = (0.0, 1.0),
    ) -> None:
        if shift <= 0 or std <= 0:
            raise ValueError(f"shift and std must be positive, got shift {shift} and std {std}")
        self.base, self.shift, self.mean, self.std = base, shift, mean, std
        self.noise_range = check_noise_range(noise_range)
        if not self.probability(self.noise_range) > 0:
            raise ValueError(f"the distribution has no mass in the range {list(self.noise_range)}")

    def _cdf(self, sigma: float) -> float:
        """Distribution function of the shifted, untruncated σ."""
        # Clamped: rounding may leave [0, 1] by one digit, where the logit is NaN.
        unshifted = shift_sigma(torch.tensor(sigma, dtype=torch.float64), 1 / self.shift).clamp(0, 1)
        if self.base == "uniform":
            return float(unshifted)
        # logit(0) and logit(1) are ∓inf, which the normal's distribution function takes to 0 and 1.
        return float(torch.special.ndtr((torch.logit(unshifted) - self.mean) / self.std))

    def at(self, u: Tensor) -> NoiseLevel:
        lo, hi = (self._cdf(edge) for edge in self.noise_range)
        quantile = lo + u.double() * (hi - lo)
        if self.base == "logit_normal":
            quantile = torch.sigmoid(self.mean + self.std * torch.special.ndtri(quantile))
        sigma = shift_sigma(quantile, self.shift).float()
        return NoiseLevel(sigma, torch.ones_like(sigma))

    def probability(self, noise_range: NoiseRange) -> float:
        lo, hi = (self._cdf(edge) for edge in noise_range)
        return hi - lo

    def describe(self) -> dict[str, Any]:
        numbers = {"mean": self.mean, "std": self.std} if self.base == "logit_normal" else {}
        return {"preset": self.base, "shift": self.shift, **numbers, "noise_range": list(self.noise_range)}
