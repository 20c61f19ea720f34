"""UNet2DModel of diffusers with DDPM's objective: no flow, no container, integer timesteps."""

from __future__ import annotations

from typing import Any, Self

from diffusers import DDPMScheduler, UNet2DModel
from torch import nn

from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, InputSpec, ModelOutput, ModelSpec
from mm_trainer.contracts.pipeline import PerSample
from mm_trainer.randomness import draw_quantile, keyed_normal


class WrappedUNet(BaseModel):
    """Predicts the noise in an image."""

    architectures = {
        "unet-tiny": {
            "sample_size": 8,
            "in_channels": 3,
            "out_channels": 3,
            "layers_per_block": 1,
            "block_out_channels": [8, 16],
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
            "norm_num_groups": 4,
            "attention_head_dim": 4,
            "dropout": 0.1,
        },
    }

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        super().__init__()
        self.net = UNet2DModel.from_config(config)
        self.seed = seed
        self.scheduler = DDPMScheduler()

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(cls.read_architecture(spec), spec.seed)

    @classmethod
    def export_config(cls, spec: ModelSpec) -> dict[str, Any]:
        """As diffusers writes it, with its class."""
        return {"_class_name": "UNet2DModel", **cls.read_architecture(spec)}

    @classmethod
    def export_folder(cls, spec: ModelSpec) -> str:
        """Where diffusers' pipelines have it."""
        return "unet"

    def weight_root(self) -> nn.Module:
        return self.net

    def input_spec(self) -> InputSpec:
        return InputSpec(spatial_multiple=2)

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                init.normal_(parameter, prefix + name, std=parameter[0].numel() ** -0.5)
            elif name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.ones_(parameter)

    def forward(self, **batch: Any) -> ModelOutput:
        """``image`` (B, 3, H, W) in [−1, 1] → the mean squared error of the predicted noise."""
        image, sample_key = batch["image"], batch["sample_key"]
        level = draw_quantile(batch, self.seed)
        timestep = (level * len(self.scheduler)).long().to(image.device)
        noise = keyed_normal(self.seed, "noise", sample_key, image.shape[1:]).to(image.device)
        noised = self.scheduler.add_noise(image, noise, timestep)
        # To the dtype that the weights have here, in the unit that owns them: diffusers' convolutions don't cast.
        prediction = self.net(noised.to(self.net.conv_in.weight.dtype), timestep).sample.float()
        losses = (prediction - noise).square().flatten(1).mean(1)
        sigma = (1 - self.scheduler.alphas_cumprod.to(image.device)[timestep]).sqrt()
        return ModelOutput(losses.mean(), PerSample(losses.detach(), sigma))
