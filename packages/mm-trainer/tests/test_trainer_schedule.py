"""Noise schedules against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from mm_trainer.pipelines.schedule import ContinuousSchedule, GridSchedule, shift_sigma

pytestmark = pytest.mark.numeric

U = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_uniform_base_has_the_closed_form_mass_above_a_boundary(shift: float) -> None:
    """P(σ' ≥ b) for uniform σ and σ' = sσ/(1+(s−1)σ) is 1 − b/(s − (s−1)b)."""
    b = 0.875
    expected = 1 - b / (shift - (shift - 1) * b)
    schedule = ContinuousSchedule("uniform", shift=shift)
    assert schedule.probability((b, 1.0)) == pytest.approx(expected, abs=1e-12)
    assert float((schedule.at(U).sigma >= b).double().mean()) == pytest.approx(expected, abs=1e-4)


def test_logit_normal_matches_the_normal_distribution_of_its_logit() -> None:
    sigma = ContinuousSchedule("logit_normal", mean=0.5, std=2.0).at(U).sigma.double()
    logit = torch.logit(sigma)
    assert float(logit.mean()) == pytest.approx(0.5, abs=1e-2)
    assert float(logit.std()) == pytest.approx(2.0, abs=1e-2)


@pytest.mark.parametrize("base", ["uniform", "logit_normal"])
def test_a_range_truncates_and_keeps_the_shape(base: str) -> None:
    whole = ContinuousSchedule(base, shift=3.0)
    inside = ContinuousSchedule(base, shift=3.0, noise_range=(0.5, 0.9))
    sigma = inside.at(U).sigma
    assert 0.5 <= float(sigma.min()) and float(sigma.max()) <= 0.9
    # The distribution inside is that of the whole, restricted: compare at the range's own median.
    kept = whole.at(U).sigma
    kept = kept[(kept >= 0.5) & (kept < 0.9)]
    assert float(sigma.median()) == pytest.approx(float(kept.median()), abs=1e-3)


def test_shift_keeps_the_ends_and_is_undone_by_its_inverse() -> None:
    sigma = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    shifted = shift_sigma(sigma, 5.0)
    assert shifted.tolist() == pytest.approx([0.0, 5 * 0.25 / 2, 1.0])
    assert shift_sigma(shifted, 1 / 5.0).tolist() == pytest.approx(sigma.tolist())


def test_a_grid_draws_each_point_of_its_range_equally_often_in_ascending_order() -> None:
    grid = GridSchedule(torch.tensor([1.0, 0.8, 0.5, 0.2]), torch.tensor([0.0, 1.0, 2.0, 3.0]), noise_range=(0.5, 1.0))
    level = grid.at(U)
    assert math.isclose(float((level.sigma == 0.5).double().mean()), 1 / 3, abs_tol=1e-4)
    assert torch.equal(level.sigma, level.sigma.sort().values)
    assert float(level.weight[level.sigma == 0.5][0]) == 2.0
    assert grid.probability((0.0, 0.5)) == 0.25, "the upper end of a range is exclusive unless it is 1"


def test_ranges_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= lo < hi <= 1"):
        ContinuousSchedule("uniform", noise_range=(0.9, 0.2))
    with pytest.raises(ValueError, match="no point of the noise grid"):
        GridSchedule(torch.tensor([1.0, 0.5]), torch.ones(2), noise_range=(0.6, 0.7))
