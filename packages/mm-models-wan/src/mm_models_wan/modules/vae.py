"""`WanVideoVAE`: the causal video VAE, as the frozen component that makes latents."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mm_checkpoint import LoadReport, WeightSource, load_weights
from mm_models_wan.weights.original import VAE_2_1_ORIGINAL, VAE_2_2_ORIGINAL, VAE_ARCHITECTURES, original_architecture
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec, Options
from mm_trainer.errors import ConfigError


class VAEOptions(Options):
    """Keys of ``model.models.ae`` that only this model knows."""

    do_sample: bool = False
    """Draw training latents from the posterior (noise keyed by the sample) instead of taking its mode."""
    tiling: bool = False
    """Work on overlapping tiles of 256 pixels, for large frames; changes latents slightly near the seams."""
    slicing: bool = False
    """Work on one clip of the batch at a time."""


class WanVideoVAE(BaseModel[VAEOptions]):
    """Wraps ``diffusers.AutoencoderKLWan`` (2.1: stride (4, 8, 8), 16 channels; 2.2-5B: (4, 16, 16), 48 channels).

    Latents are normalised per channel by the ``latents_mean`` and ``latents_std`` of the VAE's own config. Encoding and
    decoding compute in the parameters' dtype (``dtype: fp32`` unless the configuration says otherwise).

    Args:
        config: the VAE's ``config.json``.
        options: see `VAEOptions`.
    """

    architectures: ClassVar[Any] = VAE_ARCHITECTURES

    def __init__(self, config: dict[str, Any], options: VAEOptions | None = None) -> None:
        super().__init__()
        from diffusers import AutoencoderKLWan

        options = options or VAEOptions()
        model = AutoencoderKLWan.from_config(config)
        assert isinstance(model, AutoencoderKLWan)
        self.model = model.eval()
        self.do_sample = options.do_sample
        if options.tiling:
            model.enable_tiling()
        if options.slicing:
            model.enable_slicing()

    @classmethod
    def read_architecture(cls, spec: ModelSpec) -> dict[str, Any]:
        named = original_architecture(spec)
        return super().read_architecture(spec) if named is None else dict(cls.architectures[named])

    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        from diffusers import AutoencoderKLWan

        return inspect.signature(AutoencoderKLWan.__init__).parameters.keys()

    @classmethod
    def tiny_architecture(cls, architecture: Mapping[str, Any]) -> dict[str, Any]:
        """Few channels inside, as many latent channels."""
        return {**architecture, "base_dim": 4, "num_res_blocks": 1}

    @classmethod
    def from_config(cls, spec: ModelSpec[VAEOptions]) -> Self:
        config = cls.read_architecture(spec)
        made_by = config.get("_class_name", "AutoencoderKLWan")
        if made_by != "AutoencoderKLWan":
            raise ConfigError(
                f"the weights are an {made_by}, {cls.__name__} needs an AutoencoderKLWan",
                key=f"model.models.{spec.name}.from_pretrained",
            )
        model = cls(config, spec.options)
        settled = model.model.config
        if {len(settled.latents_mean), len(settled.latents_std)} != {settled.z_dim}:
            raise ConfigError(
                f"the VAE has {settled.z_dim} latent channels, its config states {len(settled.latents_mean)} means and "
                f"{len(settled.latents_std)} standard deviations",
                key=f"model.models.{spec.name}",
            )
        return model

    def weight_root(self) -> nn.Module:
        return self.model

    def setup_weights(self, source: WeightSource, *, allow_missing: Sequence[str] = ()) -> LoadReport:
        """Reads diffusers' names and those of the original release."""
        key_map = VAE_2_2_ORIGINAL if self.model.config.is_residual else VAE_2_1_ORIGINAL
        report = load_weights(self.model, source, key_map=key_map, allow_missing=tuple(allow_missing))
        self.post_load()
        return report

    @property
    def latent_channels(self) -> int:
        return int(self.model.config.z_dim)

    @property
    def frame_stride(self) -> int:
        return int(self.model.config.scale_factor_temporal)

    @property
    def spatial_stride(self) -> int:
        return int(self.model.config.scale_factor_spatial)

    def latent_shape(self, video_shape: Sequence[int]) -> tuple[int, int, int, int]:
        """(C, f, h, w) of the latents of a (…, 3, F, H, W) clip.

        Raises:
            ValueError: F isn't stride·k + 1 (the VAE would silently drop the extra frames), or H or W isn't a
                multiple of the spatial stride.
        """
        frames, height, width = video_shape[-3:]
        stride, side = self.frame_stride, self.spatial_stride
        if (frames - 1) % stride or height % side or width % side:
            raise ValueError(
                f"a clip of {frames} frames of {height}x{width} doesn't fit the VAE: "
                f"frames are {stride}k+1 and sides multiples of {side}"
            )
        return self.latent_channels, (frames - 1) // stride + 1, height // side, width // side

    @torch.no_grad()
    def forward(self, video: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode.

        Args:
            video: (B, 3, F, H, W) in [−1, 1], F = 4k + 1, H and W multiples of the stride.
            noise: (B, C, f, h, w) standard normal to draw from the posterior with; None takes the mode.

        Returns:
            (B, C, f, h, w) float32, normalised.
        """
        self.latent_shape(video.shape)
        posterior = self.model.encode(video.to(self._dtype)).latent_dist
        # From here on in float32: noise, target and loss are, and bf16 would round latents of unit variance visibly.
        latents = posterior.mode().float()
        if noise is not None:
            latents = latents + posterior.std.float() * noise
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (B, C, f, h, w) → video (B, 3, F, H, W) float32 in [−1, 1].

        Not a forward: for an unsharded VAE only.
        """
        mean, std = self._statistics(latents)
        video: Tensor = self.model.decode((latents.float() * std + mean).to(self._dtype)).sample
        return video.float().clamp(-1, 1)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        config = self.model.config
        mean, std = (
            latents.new_tensor(values, dtype=torch.float32) for values in (config.latents_mean, config.latents_std)
        )
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)

    def input_spec(self) -> InputSpec:
        return InputSpec(frame_stride=self.frame_stride, spatial_multiple=self.spatial_stride)
