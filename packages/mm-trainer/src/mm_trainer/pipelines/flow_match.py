"""`FlowMatchPipeline`: flow matching over the roles ``ae``, ``text_encoder`` and ``predictor``.

x_σ = (1 − σ)·x0 + σ·ε, target v = ε − x0, timestep t = 1000·σ, loss = mean((pred − v)²)·w per sample, then the mean
over samples (Lipman et al., "Flow Matching for Generative Modeling", 2023; rectified-flow form of Liu et al., 2023).
Noise, x_σ, v and the loss are float32 whatever the compute dtype.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mm_trainer.contracts.pipeline import (
    Batch,
    Components,
    Conditions,
    GenerativePipeline,
    ModelOutput,
    NoisedInputs,
    PerSample,
)
from mm_trainer.contracts.spec import Options, OptionsT
from mm_trainer.contracts.step import StepContext
from mm_trainer.errors import FieldError
from mm_trainer.pipelines.schedule import ContinuousSchedule, NoiseLevel, NoiseRange, NoiseSchedule
from mm_trainer.randomness import draw_quantile, keyed_normal

TIMESTEP_SCALE = 1000.0


class SchedulerOptions(Options):
    """``model.scheduler`` of a container that uses this pipeline unchanged."""

    preset: Literal["uniform", "logit_normal"] = "uniform"
    shift: float = Field(default=1.0, gt=0)
    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preset != "logit_normal" and (self.mean, self.std) != (0.0, 1.0):
            raise FieldError(
                "mean" if self.mean else "std", f"only read by preset logit_normal, and it is {self.preset}"
            )
        return self


class FlowMatchOptions(Options):
    """Container options that `FlowMatchPipeline.build` understands."""

    scheduler: SchedulerOptions = SchedulerOptions()
    noise_range: NoiseRange = (0.0, 1.0)


class FlowMatching(GenerativePipeline[OptionsT]):
    """The stages of text-to-video flow matching; a model family specialises those that it does differently.

    The components must be

    - ``ae``: ``ae(video (B, 3, F, H, W) in [−1, 1]) → latents (B, C, f, h, w)``, normalised;
    - ``text_encoder``: ``text_encoder(prompt_ids (B, L), prompt_mask (B, L)) → (B, L, D)``, zero past the prompt;
    - ``predictor``: ``predictor(noised, timestep (B,), context) → (B, C, f, h, w)`` in float32.

    Args:
        schedule: distribution and weights of σ.
        seed: the run's seed, of which all noise is a function.
    """

    predictor_role = "predictor"

    def __init__(self, schedule: NoiseSchedule, *, seed: int) -> None:
        self.schedule = schedule
        self.seed = seed

    @torch.no_grad()
    def prepare_conditions(self, components: Components, context: StepContext, batch: Batch) -> Conditions:
        context.prefetch(components["text_encoder"])
        latents = components["ae"](batch["video"])
        context.prefetch(components[self.predictor_role])
        features = components["text_encoder"](batch["prompt_ids"], batch["prompt_mask"])
        return {"latents": latents, "context": features}

    def noise_level(self, batch: Batch) -> NoiseLevel:
        """σ and weight of every sample: at its fixed quantile if the batch states one, else at a keyed draw."""
        return self.schedule.at(draw_quantile(batch, self.seed))

    def noising(
        self, components: Components, context: StepContext, conditions: Conditions, batch: Batch
    ) -> NoisedInputs:
        clean = conditions["latents"].float()
        level = self.noise_level(batch)
        noise = keyed_normal(self.seed, "noise", batch["sample_key"], clean.shape[1:]).to(clean.device)
        sigma = level.sigma.to(clean.device)
        mix = sigma.view(-1, *[1] * (clean.dim() - 1))
        return NoisedInputs(
            noised=(1 - mix) * clean + mix * noise,
            target=noise - clean,
            sigma=sigma,
            timestep=TIMESTEP_SCALE * sigma,
            weight=level.weight.to(clean.device),
            conditions=conditions,
        )

    def predict(self, components: Components, context: StepContext, inputs: NoisedInputs) -> Tensor:
        predictor = components[self.predictor_role]
        prediction: Tensor = predictor(inputs.noised, inputs.timestep, inputs.conditions["context"])
        return prediction

    def compute_loss(self, prediction: Tensor, inputs: NoisedInputs) -> ModelOutput:
        if prediction.shape != inputs.target.shape:
            raise ValueError(
                f"the prediction is {tuple(prediction.shape)}, but its target {tuple(inputs.target.shape)}"
            )
        per_sample = (prediction.float() - inputs.target).square().flatten(1).mean(1) * inputs.weight
        return ModelOutput(
            loss=per_sample.mean(),
            per_sample=PerSample(loss=per_sample.detach(), sigma=inputs.sigma.detach()),
        )

    def work(self, components: Components, inputs: NoisedInputs) -> tuple[int, int]:
        predictor = components[self.predictor_role]
        samples, _, *size = inputs.noised.shape
        return samples * predictor.input_spec().tokens(*size), samples * predictor.flops(inputs.noised.shape[1:])

    def describe(self) -> dict[str, Any]:
        return self.schedule.describe()


class FlowMatchPipeline(FlowMatching[FlowMatchOptions]):
    """`FlowMatching` unchanged, with the schedule that `FlowMatchOptions` state."""

    reads_task = False

    @classmethod
    def build(cls, *, options: FlowMatchOptions, components: Components, task: str | None, seed: int) -> Self:
        scheduler = options.scheduler
        schedule = ContinuousSchedule(
            scheduler.preset,
            shift=scheduler.shift,
            mean=scheduler.mean,
            std=scheduler.std,
            noise_range=options.noise_range,
        )
        return cls(schedule, seed=seed)
