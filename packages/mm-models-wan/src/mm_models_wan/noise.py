"""From options and weights to the σ that each predictor is trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.options import PREDICTORS, Wan22Options
from mm_models_wan.schedule import build_schedule, expert_range
from mm_models_wan.weights.release import EXPERTS, Expert, boundary_by_channels
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.schedule import NoiseRange, NoiseSchedule

logger = logging.getLogger(__name__)


def build_schedules(options: Wan22Options, predictors: Mapping[str, WanPredictor]) -> dict[str, NoiseSchedule]:
    """Schedule of every predictor, by its name.

    Raises:
        ConfigError: an expert is named, but nothing says where the experts meet; the weights are the other one's; or a
            range that holds no noise level.
    """
    ranges = _ranges(options, predictors)
    try:
        return {name: build_schedule(options.scheduler, noise_range) for name, noise_range in ranges.items()}
    except ValueError as error:
        key = "model.boundary" if options.noise_range is None else "model.noise_range"
        raise ConfigError(str(error), key=key) from error


def _ranges(options: Wan22Options, predictors: Mapping[str, WanPredictor]) -> dict[str, NoiseRange]:
    if options.expert == "both":
        boundary = find_boundary(options, predictors["predictor"])
        experts: dict[str, Expert] = dict(zip(PREDICTORS, EXPERTS, strict=True))
        for name, expert in experts.items():
            stated = predictors[name].release.expert
            if stated not in (None, expert):
                raise ConfigError(
                    f"with expert: both, predictor is the high-noise expert and predictor_2 the low-noise one, but "
                    f"{predictors[name].release.weights} is the {stated}-noise one",
                    key=f"model.models.{name}.from_pretrained",
                )
        return {name: expert_range(expert, boundary) for name, expert in experts.items()}
    return {"predictor": single_range(options, predictors["predictor"])}


def find_boundary(options: Wan22Options, predictor: WanPredictor) -> float:
    """σ where the experts meet: stated, else of the weights' pipeline folder, else of the released model."""
    known = options.boundary or predictor.release.boundary or boundary_by_channels(predictor.architecture.in_channels)
    if known is None:
        raise ConfigError(
            f"nothing says at which sigma the experts of {predictor.release.weights} meet; give model.boundary",
            key="model.expert",
        )
    return known


def single_range(options: Wan22Options, predictor: WanPredictor) -> NoiseRange:
    """The σ of a run that trains one predictor; warns if an expert is trained on all of them."""
    release = predictor.release
    if options.noise_range is not None:
        return options.noise_range
    if options.expert in ("high", "low"):
        _warn_if_sibling(options.expert, predictor)
        return expert_range(options.expert, find_boundary(options, predictor))
    boundary = release.boundary
    if boundary is not None:
        mine = f" (by its folder, these weights are the {release.expert} one)" if release.expert else ""
        logger.warning(
            "%s is one of two experts and is trained on every sigma: set model.expert to high (sigma in [%g, 1]) or "
            "low ([0, %g))%s",
            release.weights,
            boundary,
            boundary,
            mine,
        )
    return (0.0, 1.0)


def _warn_if_sibling(expert: str, predictor: WanPredictor) -> None:
    stated = predictor.release.expert
    if stated not in (None, expert):
        logger.warning(
            "model.expert is %s, but by its folder %s is the %s-noise expert", expert, predictor.release.weights, stated
        )
