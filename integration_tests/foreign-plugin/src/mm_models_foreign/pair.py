"""An autoencoder in two parts, both trained in every step; its container has a forward and no pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

from torch import Tensor, nn

from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, InputSpec, ModelContainer, ModelSpec


class _Half(BaseModel):
    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, prefix + name, std=parameter[0].numel() ** -0.5)


class Squeeze(_Half):
    """(B, 3, H, W) → (B, 8, H/2, W/2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, image: Tensor) -> Any:
        """Returns an object, as many encoders do."""
        return SimpleNamespace(latents=self.layers(image))


class Expand(_Half):
    """(B, 8, H/2, W/2) → (B, 3, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, latents: Tensor) -> Tensor:
        image: Tensor = self.layers(latents)
        return image


class Pair(ModelContainer):
    """Roles ``squeeze`` and ``expand``."""

    checkpoint_submodels = ("squeeze", "expand")

    def forward(self, **batch: Any) -> Any:
        image, parts = batch["image"], self.get_sub_models()
        guess = parts["expand"](parts["squeeze"](image).latents)
        return SimpleNamespace(loss=(guess - image).square().mean())
