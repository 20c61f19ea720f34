"""Images from captions: a frozen T5 encoder with tied tables, and a pipeline that isn't flow matching."""

from __future__ import annotations

from typing import Any, Self

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from mm_parallel import KeyedInitializer
from mm_trainer.contracts import (
    BaseModel,
    GenerativePipeline,
    InputSpec,
    ModelContainer,
    ModelOutput,
    ModelSpec,
    NoOptions,
)
from mm_trainer.contracts.pipeline import Components, Conditions, NoisedInputs, PerSample
from mm_trainer.contracts.step import StepContext
from mm_trainer.randomness import draw_quantile, keyed_normal


class TiedEncoder(BaseModel):
    """``shared`` and ``encoder.embed_tokens`` are one table, which the file holds under one name."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.net = T5EncoderModel(config)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(T5Config(**cls.read_architecture(spec)))

    def weight_root(self) -> nn.Module:
        return self.net

    def input_spec(self) -> InputSpec:
        return InputSpec(text_length=4)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) → (B, L, D)."""
        hidden: Tensor = self.net(input_ids=ids, attention_mask=ids != 0).last_hidden_state
        return hidden


class Painter(BaseModel):
    """Predicts noise from a noised image, its timestep and a caption's features."""

    architectures = {"painter-tiny": {"width": 32, "text_width": 16}}

    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, width, 3, padding=1)
        self.text = nn.Linear(text_width, width)
        self.time = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.outward = nn.Conv2d(width, 3, 3, padding=1)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(**cls.read_architecture(spec))

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, prefix + name, std=parameter[0].numel() ** -0.5)

    def forward(self, noised: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        """(B, 3, H, W), (B,) int64, (B, L, D) → (B, 3, H, W)."""
        said = self.text(context.mean(1)) + self.time(timestep)
        x = self.inward(noised) + said[:, :, None, None]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.outward(x)


class Captioned(ModelContainer):
    """Roles ``encoder`` and ``painter``."""

    checkpoint_submodels = ("painter",)
    pipeline_id = "foreign_ddpm"


class DDPM(GenerativePipeline[NoOptions]):
    """Noise prediction at integer timesteps."""

    def __init__(self, seed: int) -> None:
        self.seed, self.scheduler = seed, DDPMScheduler()

    @classmethod
    def build(cls, *, options: NoOptions, components: Components, task: str | None, seed: int) -> Self:
        return cls(seed)

    @torch.no_grad()
    def prepare_conditions(self, components: Components, context: StepContext, batch: dict[str, Any]) -> Conditions:
        return {"context": components["encoder"](batch["prompt_ids"])}

    def noising(
        self, components: Components, context: StepContext, conditions: Conditions, batch: dict[str, Any]
    ) -> NoisedInputs:
        image, key = batch["image"], batch["sample_key"]
        level = draw_quantile(batch, self.seed)
        timestep = (level * len(self.scheduler)).long().to(image.device)
        noise = keyed_normal(self.seed, "noise", key, image.shape[1:]).to(image.device)
        return NoisedInputs(
            noised=self.scheduler.add_noise(image, noise, timestep),
            target=noise,
            sigma=(1 - self.scheduler.alphas_cumprod.to(image.device)[timestep]).sqrt(),
            timestep=timestep,
            weight=torch.ones_like(timestep, dtype=torch.float32),
            conditions=conditions,
        )

    def predict(self, components: Components, context: StepContext, inputs: NoisedInputs) -> Tensor:
        prediction: Tensor = components["painter"](inputs.noised, inputs.timestep, inputs.conditions["context"])
        return prediction

    def compute_loss(self, prediction: Tensor, inputs: NoisedInputs) -> ModelOutput:
        losses = (prediction.float() - inputs.target).square().flatten(1).mean(1)
        return ModelOutput(losses.mean(), PerSample(losses.detach(), inputs.sigma))
