"""`WanPipeline`: flow matching with Wan2.2's schedules, experts and tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, cast

import torch

from mm_models_wan.container import Wan22Options
from mm_models_wan.predictor import WanPredictor
from mm_models_wan.release import boundary_by_channels
from mm_models_wan.schedule import build_schedule, expert_range
from mm_models_wan.vae import WanVideoVAE
from mm_trainer.contracts import BaseModel, ModelContainer, Options
from mm_trainer.contracts.pipeline import Batch, Conditions
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.flow_match import FlowMatchPipeline
from mm_trainer.pipelines.schedule import NoiseRange
from mm_trainer.randomness import keyed_normal

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class WanPipeline(FlowMatchPipeline):
    """Text-to-video."""

    @classmethod
    def build(cls, *, options: Options, components: Mapping[str, BaseModel], task: str | None, seed: int) -> Self:
        if not isinstance(options, Wan22Options):
            raise TypeError(f"{cls.__qualname__} needs the options of Wan22Container, got {type(options)}")
        predictor, ae = components["predictor"], components["ae"]
        assert isinstance(predictor, WanPredictor)
        assert isinstance(ae, WanVideoVAE)
        check_channels(predictor, ae)
        return cls(build_schedule(options.scheduler, resolve_noise_range(options, predictor)), seed=seed)

    @torch.no_grad()
    def prepare_conditions(self, container: ModelContainer, batch: Batch) -> Conditions:
        components = container.get_sub_models()
        latents = self.encode_video(cast(WanVideoVAE, components["ae"]), batch)
        context = components["text_encoder"](batch["prompt_ids"], batch["prompt_mask"])
        return {"latents": latents, "context": context}

    def encode_video(self, ae: WanVideoVAE, batch: Batch) -> Tensor:
        """Normalised latents of ``batch["video"]``; with ``do_sample``, drawn by noise that is keyed by the sample."""
        video: Tensor = batch["video"]
        noise = None
        if ae.do_sample:
            shape = ae.latent_shape(video.shape)
            noise = keyed_normal(self.seed, "posterior", batch["sample_key"], shape).to(video.device)
        latents: Tensor = ae(video, noise)
        return latents


def check_channels(predictor: WanPredictor, ae: WanVideoVAE) -> None:
    """Refuse weights whose channels don't fit text-to-video.

    Raises:
        ConfigError: names both numbers and the weights.
    """
    got, needs = predictor.architecture.in_channels, ae.latent_channels
    if got != needs:
        raise ConfigError(
            f"task t2v feeds the transformer {needs} channels (the VAE's latents), but the weights in "
            f"{predictor.release.weights} take {got}",
            key="model.task",
        )


def resolve_noise_range(options: Wan22Options, predictor: WanPredictor) -> NoiseRange:
    """The σ that the predictor is trained on.

    Raises:
        ConfigError: an expert is named, but nothing says where the experts meet.
    """
    release = predictor.release
    boundary = options.boundary or release.boundary
    if options.noise_range is not None:
        return options.noise_range
    if options.expert is not None:
        boundary = boundary or boundary_by_channels(predictor.architecture.in_channels)
        if boundary is None:
            raise ConfigError(
                f"nothing says at which sigma the experts of {release.weights} meet; give model.boundary",
                key="model.expert",
            )
        return expert_range(options.expert, boundary)
    if boundary is not None:
        which = {name: list(expert_range(name, boundary)) for name in ("high", "low")}
        mine = f"; these weights are the {release.expert}-noise one" if release.expert else ""
        logger.warning(
            "%s is one of two experts and is trained on all sigmas: set model.expert, so that high trains on %s and low "
            "on %s%s",
            release.weights,
            which["high"],
            which["low"],
            mine,
        )
    return (0.0, 1.0)
