"""`WanPipeline`: flow matching with Wan2.2's schedules and experts; one subclass per task."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.modules.vae import WanVideoVAE
from mm_models_wan.noise import build_schedules
from mm_models_wan.options import PREDICTORS, Wan22Options
from mm_trainer.contracts import ModelOutput, NoisedInputs, StepContext, component
from mm_trainer.contracts.pipeline import Batch, Components, Conditions
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.flow_match import FlowMatching
from mm_trainer.pipelines.schedule import NoiseSchedule
from mm_trainer.randomness import keyed_normal, keyed_uniform


class WanPipeline(FlowMatching[Wan22Options]):
    """Task t2v, and the base of the other tasks.

    Args:
        schedules: predictor's name → its schedule. With two of them, one is active at a time.
        seed: the run's seed.
        last_frame: task i2v with first and last frame.
    """

    task: ClassVar[str] = "t2v"

    def __init__(self, schedules: Mapping[str, NoiseSchedule], *, seed: int, last_frame: bool = False) -> None:
        super().__init__(schedules["predictor"], seed=seed)
        self.schedules = dict(schedules)
        self.last_frame = last_frame

    @classmethod
    def build(cls, *, options: Wan22Options, components: Components, task: str | None, seed: int) -> Self:
        chosen = next((kind for kind in (cls, *cls.__subclasses__()) if kind.task == task), None)
        if chosen is None:
            raise ConfigError(f"task {task!r} is not one of this pipeline's", key="model.task")
        ae = component(components, "ae", WanVideoVAE)
        predictors = {name: component(components, name, WanPredictor) for name in PREDICTORS if name in components}
        for name, predictor in predictors.items():
            chosen.check_weights(name, predictor, ae)
        return chosen(build_schedules(options, predictors), seed=seed, last_frame=options.last_frame)

    # --- which weights fit ---------------------------------------------------------------------------------------

    @classmethod
    def model_channels(cls, ae: WanVideoVAE) -> int:
        """Channels that this task feeds the transformer."""
        return ae.latent_channels

    @classmethod
    def check_weights(cls, name: str, predictor: WanPredictor, ae: WanVideoVAE) -> None:
        """Refuse weights that don't fit the task, or the VAE.

        Raises:
            ConfigError: with both numbers and the weights' place.
        """
        shapes, place = predictor.architecture, predictor.release.weights
        needs = cls.model_channels(ae)
        if shapes.in_channels != needs:
            raise ConfigError(
                f"task {cls.task} feeds the transformer {needs} channels (with a VAE of {ae.latent_channels}), but "
                f"{place} takes {shapes.in_channels}",
                key=f"model.models.{name}",
            )
        if shapes.out_channels != ae.latent_channels:
            raise ConfigError(
                f"{place} predicts {shapes.out_channels} channels, the VAE's latents have {ae.latent_channels}",
                key=f"model.models.{name}",
            )

    # --- two experts ---------------------------------------------------------------------------------------------

    def probabilities(self) -> dict[str, float]:
        """Predictor's name → probability that a step trains it: the mass of its noise range."""
        masses = {name: schedule.probability(schedule.noise_range) for name, schedule in self.schedules.items()}
        return {name: mass / sum(masses.values()) for name, mass in masses.items()}

    def draw_predictor(self, step: int) -> str:
        """The predictor that optimizer step ``step`` trains, a function of (seed, step) alone."""
        draw = keyed_uniform(self.seed, "expert", torch.tensor([step])).item()
        names, edges = list(self.schedules), list(accumulate(self.probabilities().values()))
        return names[bisect(edges[:-1], draw)]

    def activate(self, name: str) -> None:
        """Predict with this predictor, at noise levels of its range."""
        self.schedule = self.schedules[name]
        self.predictor_role = name

    # --- stages --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_conditions(self, components: Components, context: StepContext, batch: Batch) -> Conditions:
        # With cross_submodel_prefetch, the next sub-model's first gather runs under the current one's compute.
        context.prefetch(components["text_encoder"])
        conditions = self.encode_video(component(components, "ae", WanVideoVAE), batch)
        context.prefetch(components[self.predictor_role])
        conditions["context"] = components["text_encoder"](batch["prompt_ids"], batch["prompt_mask"])
        return conditions

    def encode_video(self, ae: WanVideoVAE, batch: Batch) -> dict[str, Tensor]:
        """``latents`` (B, C, f, h, w), and what else the task takes from the clip."""
        return {"latents": self.encode_target(ae, batch)}

    def encode_target(self, ae: WanVideoVAE, batch: Batch) -> Tensor:
        """Normalised latents of the clip: the posterior's mode, or with ``do_sample`` a draw keyed by the sample."""
        video: Tensor = batch["video"]
        noise = None
        if ae.do_sample:
            shape = ae.latent_shape(video.shape)
            noise = keyed_normal(self.seed, "posterior", batch["sample_key"], shape).to(video.device)
        latents: Tensor = ae(video, noise)
        return latents

    def describe(self) -> dict[str, Any]:
        if len(self.schedules) == 1:
            return {"task": self.task, **self.schedule.describe()}
        shares = self.probabilities()
        experts = {name: {**s.describe(), "probability": shares[name]} for name, s in self.schedules.items()}
        return {"task": self.task, "experts": experts}


class ImageToVideoPipeline(WanPipeline):
    """Task i2v: the first frame, or first and last, come as extra channels of every latent frame.

    The channels are a mask (one per pixel frame of a latent frame: 1 where the frame is given) and the normalised
    latents of a clip that holds the given frames and mid-grey elsewhere. Models of Wan2.1 also read
    ``batch["image_embeds"]``, (B, image tokens, image_dim), made beforehand by their CLIP tower.
    """

    task = "i2v"

    @classmethod
    def model_channels(cls, ae: WanVideoVAE) -> int:
        return ae.latent_channels + ae.frame_stride + ae.latent_channels

    def encode_video(self, ae: WanVideoVAE, batch: Batch) -> dict[str, Tensor]:
        video: Tensor = batch["video"]
        given = torch.zeros_like(video)
        given[:, :, 0] = video[:, :, 0]
        if self.last_frame:
            given[:, :, -1] = video[:, :, -1]
        latents: Tensor = ae(given)
        mask = latents.new_zeros(len(latents), ae.frame_stride, *latents.shape[2:])
        mask[:, :, 0] = 1  # the first latent frame is one pixel frame, which stands for all of its stride
        if self.last_frame:
            mask[:, -1, -1] = 1
        conditions = {"latents": self.encode_target(ae, batch), "image": torch.cat([mask, latents], dim=1)}
        if "image_embeds" in batch:
            conditions["image_embeds"] = batch["image_embeds"]
        return conditions

    def predict(self, components: Components, context: StepContext, inputs: NoisedInputs) -> Tensor:
        predictor = components[self.predictor_role]
        conditions = inputs.conditions
        model_input = torch.cat([inputs.noised, conditions["image"]], dim=1)
        prediction: Tensor = predictor(
            model_input, inputs.timestep, conditions["context"], conditions.get("image_embeds")
        )
        return prediction


class CleanFirstFramePipeline(WanPipeline):
    """Task ti2v: the first latent frame stays clean, its tokens have timestep 0 and no loss.

    The VAE is causal, so the first latent frame of a clip is the encoding of its first frame alone.
    """

    task = "ti2v"

    @classmethod
    def check_weights(cls, name: str, predictor: WanPredictor, ae: WanVideoVAE) -> None:
        super().check_weights(name, predictor, ae)
        if not predictor.release.per_token_timesteps:
            raise ConfigError(
                f"task ti2v gives every token its own timestep, which {predictor.release.weights} isn't made for "
                "(TI2V-5B is: expand_timesteps in its model_index.json, or architecture: TI2V-5B)",
                key=f"model.models.{name}",
            )
        if predictor.architecture.patch_size[0] != 1:
            raise ConfigError("task ti2v needs patches of one latent frame", key=f"model.models.{name}")

    def encode_video(self, ae: WanVideoVAE, batch: Batch) -> dict[str, Tensor]:
        latents = self.encode_target(ae, batch)
        if ae.do_sample:  # what is given at inference is the mode, so it is what training gives
            latents[:, :, :1] = ae(batch["video"][:, :, :1])
        return {"latents": latents}

    def noising(
        self, components: Components, context: StepContext, conditions: Conditions, batch: Batch
    ) -> NoisedInputs:
        inputs = super().noising(components, context, conditions, batch)
        clean = conditions["latents"].float()  # noised latents stay float32 up to the model's input
        frames = clean.shape[2]
        if frames < 2:
            raise ValueError("task ti2v needs clips of more than one latent frame: the first one is given")
        patch = component(components, self.predictor_role, WanPredictor).architecture.patch_size[1]
        tokens_per_frame = (clean.shape[3] // patch) * (clean.shape[4] // patch)
        per_frame = inputs.timestep[:, None].repeat(1, frames)
        per_frame[:, 0] = 0
        noised = torch.cat([clean[:, :, :1], inputs.noised[:, :, 1:]], dim=2)
        return replace(inputs, noised=noised, timestep=per_frame.repeat_interleave(tokens_per_frame, dim=1))

    def compute_loss(self, prediction: Tensor, inputs: NoisedInputs) -> ModelOutput:
        return super().compute_loss(prediction[:, :, 1:], replace(inputs, target=inputs.target[:, :, 1:]))
