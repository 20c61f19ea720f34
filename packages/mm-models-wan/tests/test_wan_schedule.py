"""The noise schedules against golden numbers and closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mm_models_wan.options import Wan22Options
from mm_models_wan.schedule import WanSchedulerOptions, build_schedule, expert_range
from mm_trainer.pipelines.schedule import GridSchedule, shift_sigma
from mm_trainer.randomness import keyed_uniform

pytestmark = pytest.mark.numeric

GOLDEN_SIGMAS = {
    "wan": {
        0: 1.0,
        1: 0.9996671,
        251: 0.8997604,
        301: 0.8747920,
        499: 0.7514940,
        500: 0.7507478,
        998: 0.0118812,
        999: 0.0089286,
    },
    "shift5": {357: 0.9000560, 358: 0.8996637, 416: 0.8752998, 417: 0.8748499, 999: 0.0049801},
}
GOLDEN_PEAK = {"wan": (1.7943343, 751, 0.0493869), "shift5": (2.0764003, 833, 0.0318791)}
GOLDEN_COUNTS = {"wan": (301, 251), "shift5": (417, 358)}


def grid(preset: str) -> GridSchedule:
    schedule = build_schedule(WanSchedulerOptions(preset=preset))  # type: ignore[arg-type]
    assert isinstance(schedule, GridSchedule)
    return schedule


@pytest.mark.parametrize("preset", ["wan", "shift5"])
def test_grid_equals_the_golden_table(preset: str) -> None:
    sigmas = grid(preset).sigmas
    assert len(sigmas) == 1000
    for index, sigma in GOLDEN_SIGMAS[preset].items():
        assert sigmas[index].item() == pytest.approx(sigma, abs=1e-6)
    counts = tuple(int((sigmas >= boundary).sum()) for boundary in (0.875, 0.9))
    assert counts == GOLDEN_COUNTS[preset]


@pytest.mark.parametrize("preset", ["wan", "shift5"])
def test_weights_are_the_bell_with_mean_one(preset: str) -> None:
    weights = grid(preset).weights
    peak, where, last = GOLDEN_PEAK[preset]
    assert weights.max().item() == pytest.approx(peak, abs=1e-6)
    assert int(weights.argmax()) == where
    assert weights[999].item() == pytest.approx(last, abs=1e-6)
    assert weights.mean().item() == pytest.approx(1.0, abs=1e-9)
    if preset == "wan":
        assert weights[0].item() == 0.0


@pytest.mark.parametrize(("boundary", "high", "low"), [(0.875, 0.316, 1.294), (0.9, 0.258, 1.249)])
def test_weights_are_not_renormalised_inside_a_range(boundary: float, high: float, low: float) -> None:
    for expert, mean in (("high", high), ("low", low)):
        schedule = build_schedule(WanSchedulerOptions(), expert_range(expert, boundary))  # type: ignore[arg-type]
        assert schedule.describe()["mean_weight"] == pytest.approx(mean, abs=1e-3)


def test_the_default_grid_is_not_the_one_of_diffusers() -> None:
    """A guard against modernising it: the two differ by 0.0059 at most, which is easily taken for rounding."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas[:1000].double()
    assert (grid("wan").sigmas - theirs).abs().max().item() == pytest.approx(0.0059, abs=1e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("preset", ["uniform", "logit_normal"])
def test_shift_is_applied_exactly_once(preset: str, shift: float) -> None:
    """B085."""
    quantiles = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=torch.float64)
    plain = build_schedule(WanSchedulerOptions(preset=preset, shift=1.0)).at(quantiles)  # type: ignore[arg-type]
    shifted = build_schedule(WanSchedulerOptions(preset=preset, shift=shift)).at(quantiles)  # type: ignore[arg-type]
    expected = shift * plain.sigma / (1 + (shift - 1) * plain.sigma)
    torch.testing.assert_close(shifted.sigma, expected, rtol=0, atol=1e-6)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert torch.equal(shift_sigma(ends, shift), ends)


UNIFORM = {1.0: (0.125, 0.1), 3.0: (0.3, 0.25), 5.0: (0.4167, 0.3571), 12.0: (0.6316, 0.5714)}
LOGIT_NORMAL = {1.0: (0.0258, 0.0140), 3.0: (0.1984, 0.1360), 5.0: (0.3683, 0.2783), 12.0: (0.7051, 0.6132)}


@pytest.mark.parametrize(("preset", "table"), [("uniform", UNIFORM), ("logit_normal", LOGIT_NORMAL)])
def test_natural_probability_of_the_high_noise_expert(preset: Any, table: dict[float, tuple[float, float]]) -> None:
    for shift, expected in table.items():
        schedule = build_schedule(WanSchedulerOptions(preset=preset, shift=shift))
        for boundary, probability in zip((0.875, 0.9), expected, strict=True):
            assert schedule.probability((boundary, 1.0)) == pytest.approx(probability, abs=6e-5)


def cdf(preset: str, shift: float, sigma: torch.Tensor) -> torch.Tensor:
    """Closed form of the shifted distribution, written out independently of the code under test."""
    base = sigma / (shift - (shift - 1) * sigma)
    if preset == "logit_normal":
        return 0.5 * (1 + torch.erf(torch.log(base / (1 - base)) / 2**0.5))
    return base


@pytest.mark.parametrize("noise_range", [(0.0, 1.0), (0.875, 1.0), (0.0, 0.875), (0.9, 1.0), (0.0, 0.9), (0.2, 0.7)])
@pytest.mark.parametrize(("preset", "shift"), [("wan", 3.0), ("shift5", 5.0), ("uniform", 5.0), ("logit_normal", 3.0)])
def test_drawn_sigmas_match_the_closed_form(preset: Any, shift: float, noise_range: tuple[float, float]) -> None:
    """B082, B084: Kolmogorov–Smirnov distance of 100,000 draws to the truncated distribution; nothing outside."""
    lo, hi = noise_range
    schedule = build_schedule(WanSchedulerOptions(preset=preset), noise_range)
    if preset in ("uniform", "logit_normal"):
        schedule = build_schedule(WanSchedulerOptions(preset=preset, shift=shift), noise_range)
    draws = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sigma = schedule.at(draws).sigma.double().sort().values
    assert sigma[0] >= lo - 1e-7
    assert sigma[-1] <= hi
    base = "uniform" if preset in ("wan", "shift5") else preset
    low, high = (cdf(base, shift, torch.tensor(edge, dtype=torch.float64)) for edge in noise_range)
    expected = (cdf(base, shift, sigma) - low) / (high - low)
    observed = (torch.arange(len(sigma), dtype=torch.float64) + 0.5) / len(sigma)
    # 1.95/sqrt(n) is the 0.1 % critical value; a grid adds at most one step of its own, 1/points, and the wan grid's
    # smallest unshifted value lies 0.003 above 0.
    steps = 1 / schedule.describe().get("points_in_range", 10**9)
    slack = 1.95 / len(sigma) ** 0.5 + 1.5 * steps + (0.003 if preset == "wan" and lo == 0 else 0)
    assert (expected - observed).abs().max().item() < slack


def test_sample_keyed_draws_are_uniform() -> None:
    keys = torch.arange(4000)
    draws = keyed_uniform(7, "sigma", keys).sort().values
    observed = (torch.arange(len(draws), dtype=torch.float64) + 0.5) / len(draws)
    assert (draws - observed).abs().max().item() < 1.95 / len(draws) ** 0.5


@pytest.mark.parametrize("value", [0.417, 0.358, 0.4167])
def test_index_fractions_are_refused_as_a_noise_range(value: float) -> None:
    with pytest.raises(ValidationError, match=r"is not a sigma.*write 0\.(875|9)"):
        Wan22Options(noise_range=(0.0, value))


@pytest.mark.parametrize("noise_range", [(0.9, 0.1), (0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)])
def test_impossible_ranges_are_refused(noise_range: tuple[float, float]) -> None:
    """B082."""
    with pytest.raises(ValidationError, match="0 <= lo < hi <= 1"):
        Wan22Options(noise_range=noise_range)


def test_contradicting_scheduler_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="preset shift5 has shift 5"):
        WanSchedulerOptions(preset="shift5", shift=3.0)
    with pytest.raises(ValidationError, match="belong to preset logit_normal"):
        WanSchedulerOptions(preset="wan", mean=0.5)
    with pytest.raises(ValidationError, match="expert and noise_range both"):
        Wan22Options(expert="low", noise_range=(0.0, 0.5))


def test_description_names_preset_shift_and_range() -> None:
    """B084: this is what is printed at start and stored in the checkpoint."""
    described = build_schedule(WanSchedulerOptions(), (0.875, 1.0)).describe()
    assert described["preset"] == "wan"
    assert described["shift"] == 3.0
    assert described["noise_range"] == [0.875, 1.0]
    assert described["points_in_range"] == 301
