"""`WanPredictor`: the Wan2.2 (and Wan2.1) diffusion transformer as a trainable sub-model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from mm_models_wan.modules.dit import (
    Block,
    CastLinear,
    Context,
    Fp32Linear,
    Head,
    ImageEmbedding,
    LocalTokens,
    PatchEmbedding,
)
from mm_models_wan.modules.functional import sinusoid
from mm_models_wan.modules.rope import Grid, RotaryTables
from mm_models_wan.weights.architecture import ARCHITECTURES, TINY_TEXT_DIM, WanArchitecture, infer_architecture
from mm_models_wan.weights.release import WanRelease, read_release
from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, InputSpec, ModelSpec, Options
from mm_trainer.errors import ConfigError

DIFFUSERS_CLASS = "WanTransformer3DModel"


class PredictorOptions(Options):
    """Keys of ``model.models.predictor`` that only this model knows."""

    residual_dtype: Literal["fp32", "compute"] = "fp32"
    """dtype of the residual stream: float32 as in the reference, or the compute dtype, which halves what recompute
    keeps of every block."""


class WanPredictor(BaseModel[PredictorOptions]):
    """Predicts v = ε − x0 from noised latents, timestep and text.

    Parameter names are those of the original release; the key map ``wan2_2`` translates diffusers' files. Numbers:
    [Note: precision] in `mm_models_wan.modules.dit`.

    Args:
        architecture: the shapes.
        residual_dtype: see `PredictorOptions`.
        release: what is known of the model beyond its shapes (expert, boundary).
    """

    key_map = "wan2_2"
    splits_sequence = True
    architectures: ClassVar[Any] = ARCHITECTURES

    def __init__(
        self,
        architecture: WanArchitecture,
        *,
        residual_dtype: Literal["fp32", "compute"] = "fp32",
        release: WanRelease | None = None,
    ) -> None:
        super().__init__()
        self.architecture, self.residual_dtype = architecture, residual_dtype
        self.release = release or WanRelease()
        dim = architecture.dim
        self.patch_embedding = PatchEmbedding(
            architecture.in_channels, dim, kernel_size=architecture.patch_size, stride=architecture.patch_size
        )
        self.text_embedding = nn.Sequential(
            CastLinear(architecture.text_dim, dim), nn.GELU(approximate="tanh"), CastLinear(dim, dim)
        )
        self.time_embedding = nn.Sequential(Fp32Linear(architecture.freq_dim, dim), nn.SiLU(), Fp32Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), Fp32Linear(dim, 6 * dim))
        if architecture.image_dim is not None:
            self.img_emb = ImageEmbedding(architecture.image_dim, dim, architecture.pos_embed_seq_len)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.num_layers))
        self.head = Head(architecture)
        self._rotary = RotaryTables(architecture.attention_head_dim, architecture.rope_max_seq_len)

    @classmethod
    def read_architecture(cls, spec: ModelSpec) -> dict[str, Any]:
        """As for any model, but a file without a ``config.json`` next to it is read for its tensors' shapes."""
        source = spec.weights if spec.architecture is None else None
        if source is None or source.config is not None:
            return super().read_architecture(spec)
        opened = source.open()
        shapes = {name: info.shape for name, info in opened.tensors.items()}
        opened.close()
        return infer_architecture(shapes)

    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        return WanArchitecture.keys()

    @classmethod
    def tiny_architecture(cls, architecture: Mapping[str, Any]) -> dict[str, Any]:
        """Two narrow blocks with eight heads, so that Ulysses still splits them."""
        narrow = {"num_layers": 2, "num_attention_heads": 8, "attention_head_dim": 16, "ffn_dim": 256}
        return {**asdict(WanArchitecture.parse(architecture)), **narrow, "text_dim": TINY_TEXT_DIM}

    @classmethod
    def export_config(cls, spec: ModelSpec) -> dict[str, Any]:
        """As diffusers writes it; verbatim where the source's own is already diffusers'."""
        config = cls.read_architecture(spec)
        if config.get("_class_name") == DIFFUSERS_CLASS:
            return config
        shapes = asdict(WanArchitecture.parse(config))
        return {"_class_name": DIFFUSERS_CLASS, **shapes, "patch_size": list(shapes["patch_size"])}

    @classmethod
    def from_config(cls, spec: ModelSpec[PredictorOptions]) -> Self:
        key = f"model.models.{spec.name}"
        if spec.attn_implementation not in (None, "sdpa"):
            raise ConfigError(
                f"{cls.__name__} attends through mm-parallel, which chooses the kernel: attn_implementation may be "
                f"sdpa or null, got {spec.attn_implementation!r}",
                key=f"{key}.attn_implementation",
            )
        try:
            architecture = WanArchitecture.parse(cls.read_architecture(spec))
        except ValueError as error:
            raise ConfigError(f"not the shapes of a Wan transformer: {error}", key=key) from error
        return cls(architecture, residual_dtype=spec.options.residual_dtype, release=read_release(spec))

    def forward(self, noised: Tensor, timestep: Tensor, context: Tensor, image_embeds: Tensor | None = None) -> Tensor:
        """One prediction.

        Args:
            noised: (B, in_channels, F, H, W), any dtype; F, H, W multiples of the patch.
            timestep: (B,) float32 in [0, 1000], or (B, tokens) with tokens in order (frame, height, width).
            context: (B, T, text_dim) text features, exactly zero past each prompt's end.
            image_embeds: (B, image tokens, image_dim), for models that have an image embedding and only for those.

        Returns:
            (B, out_channels, F, H, W) float32.

        Raises:
            ValueError: shapes that don't fit.
        """
        grid = self._grid(noised, timestep)
        tokens = math.prod(grid)
        shard = self.context_parallel.shard(tokens)
        if timestep.dim() == 2:
            timestep = shard.split(timestep)
        time = self.time_embedding(sinusoid(timestep.reshape(len(timestep), -1), self.architecture.freq_dim))
        modulation = self.time_projection(time).unflatten(2, (6, -1)).unbind(2)
        cos, sin = (shard.split(table) for table in self._rotary(grid, noised.device))
        local = LocalTokens(shard, cos, sin)
        encoded = Context(self.text_embedding(context), self._embed_image(image_embeds))

        x = shard.split(self.patch_embedding(noised))
        if self.residual_dtype == "fp32":
            x = x.float()
        for block in self.blocks:
            x = block(x, modulation, encoded, local)
        return self._unpatchify(shard.gather(self.head(x, time)), grid)

    def _grid(self, noised: Tensor, timestep: Tensor) -> Grid:
        channels, *sizes = noised.shape[1:]
        patch = self.architecture.patch_size
        if channels != self.architecture.in_channels:
            raise ValueError(f"the model takes {self.architecture.in_channels} channels, got {channels}")
        if any(size % p for size, p in zip(sizes, patch, strict=True)):
            raise ValueError(f"latents of {tuple(sizes)} are no multiple of the patch {patch}")
        frames, height, width = (size // p for size, p in zip(sizes, patch, strict=True))
        if timestep.dim() == 2 and timestep.shape[1] != frames * height * width:
            raise ValueError(f"{timestep.shape[1]} timesteps per sample for {frames * height * width} tokens")
        return frames, height, width

    def _embed_image(self, image_embeds: Tensor | None) -> Tensor | None:
        if (image_embeds is None) != (self.architecture.image_dim is None):
            asks = "needs" if image_embeds is None else "takes no"
            raise ValueError(f"this model {asks} image embeddings (image_dim {self.architecture.image_dim})")
        return None if image_embeds is None else self.img_emb(image_embeds)

    def _unpatchify(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, tokens, patch volume · C), channel fastest inside a patch → (B, C, F, H, W)."""
        (f, h, w), (pf, ph, pw) = grid, self.architecture.patch_size
        x = x.reshape(len(x), f, h, w, pf, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.reshape(len(x), -1, f * pf, h * ph, w * pw)

    @torch.no_grad()
    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        """The reference's rule for training from scratch. A fresh model predicts exactly zero and only its head
        receives a gradient at first."""
        std_modulation = self.architecture.dim**-0.5
        for name, param in self.named_parameters():
            key = prefix + name
            embeds = name.startswith(("text_embedding.", "time_embedding.", "time_projection."))
            if name.endswith("modulation"):
                init.normal_(param, key, std_modulation)
            elif name == "img_emb.emb_pos" or name.endswith(".bias") or name.startswith("head."):
                init.zeros_(param)
            elif param.dim() == 1:
                init.ones_(param)  # the scale of a norm
            elif embeds:
                init.normal_(param, key, 0.02)
            else:
                fan_out, fan_in = param.shape[0], math.prod(param.shape[1:])
                init.uniform_(param, key, math.sqrt(6 / (fan_in + fan_out)))

    @property
    def attention_heads(self) -> int:
        """Heads of self-attention, which a Ulysses degree has to divide."""
        return self.architecture.num_attention_heads

    def input_spec(self) -> InputSpec:
        frames, side, _ = self.architecture.patch_size
        return InputSpec(frame_stride=frames, spatial_multiple=side)

    def flops(self, shape: Sequence[int]) -> int:
        channels, frames, height, width = shape
        return self.architecture.flops((channels, frames, height, width))
