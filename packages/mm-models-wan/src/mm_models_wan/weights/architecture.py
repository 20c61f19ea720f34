"""Shapes of the Wan transformers: read from either release's ``config.json``; named for ``architecture:``.

Free of torch, so that a configuration can be checked early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_LENGTH = 512
"""Text positions that every released model was trained with."""
IMAGE_TOKENS = 257
"""Image tokens of a Wan2.1 image-to-video model: 16×16 patches of its CLIP tower and the class token."""

TINY_TEXT_DIM = 32
"""Width of text features between models that were cut down for a test or a check."""

HEAD_DIM = 128
"""Of every released model."""


def _diffusers(*, in_channels: int, out_channels: int, heads: int, ffn_dim: int, layers: int) -> dict[str, Any]:
    """A ``config.json`` as diffusers writes it."""
    return {
        "patch_size": [1, 2, 2],
        "num_attention_heads": heads,
        "attention_head_dim": HEAD_DIM,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn_dim,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }


ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "T2V-A14B": _diffusers(in_channels=16, out_channels=16, heads=40, ffn_dim=13824, layers=40),
    "I2V-A14B": _diffusers(in_channels=36, out_channels=16, heads=40, ffn_dim=13824, layers=40),
    "TI2V-5B": _diffusers(in_channels=48, out_channels=48, heads=24, ffn_dim=14336, layers=30),
}

# The original release's config.json → the names of diffusers.
_ORIGINAL_KEYS = {
    "patch_size": "patch_size",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "text_dim": "text_dim",
    "num_layers": "num_layers",
    "cross_attn_norm": "cross_attn_norm",
    "eps": "eps",
}
_ORIGINAL_IGNORED = {"dim", "num_heads", "model_type", "text_len", "qk_norm", "window_size"}


@dataclass(frozen=True)
class WanArchitecture:
    """Shapes of one Wan transformer, with the field names of diffusers' ``WanTransformer3DModel``."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        if self.qk_norm != "rms_norm_across_heads":
            raise ValueError(f"qk_norm {self.qk_norm!r} is not one of: rms_norm_across_heads")
        if self.attention_head_dim % 2:
            raise ValueError(f"attention_head_dim must be even for the rotary embedding, got {self.attention_head_dim}")
        if self.patch_size[1] != self.patch_size[2]:
            raise ValueError(f"patches must be square, got patch_size {list(self.patch_size)}")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            raise ValueError(
                "image_dim and added_kv_proj_dim come together, "
                f"got image_dim {self.image_dim} and added_kv_proj_dim {self.added_kv_proj_dim}"
            )

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_volume(self) -> int:
        frames, height, width = self.patch_size
        return frames * height * width

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> WanArchitecture:
        """Read a ``config.json`` of diffusers or of the original release.

        Raises:
            ValueError: a key or a value that this model doesn't know.
        """
        fields = _from_original(config) if "num_heads" in config else dict(config)
        fields = {key: value for key, value in fields.items() if not key.startswith("_")}
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"the transformer's config has unknown keys {unknown}; known: {list(cls.__dataclass_fields__)}"
            )
        if fields.get("out_channels", 0) is None:
            fields["out_channels"] = fields.get("in_channels", cls.in_channels)
        return cls(**fields)

    @classmethod
    def keys(cls) -> frozenset[str]:
        """What a ``config.json`` of either release may state."""
        original = {*_ORIGINAL_KEYS, *_ORIGINAL_IGNORED, "dim", "num_heads"}
        return frozenset({*cls.__dataclass_fields__, *original})

    def flops(self, shape: tuple[int, int, int, int]) -> int:
        """FLOPs of one forward of one sample of latents (C, F, H, W), multiply and add counted as two.

        Counted are the matrix products and the two attentions; norms, activations and rotations are below 1 %.
        """
        _, frames, height, width = shape
        tokens = frames * height * width // self.patch_volume
        dim, text = self.dim, TEXT_LENGTH
        self_attention = 4 * 2 * tokens * dim * dim + 4 * tokens * tokens * dim
        cross_attention = 2 * 2 * (tokens + text) * dim * dim + 4 * tokens * text * dim
        if self.added_kv_proj_dim is not None:
            cross_attention += 2 * 2 * IMAGE_TOKENS * self.added_kv_proj_dim * dim + 4 * tokens * IMAGE_TOKENS * dim
        feed_forward = 2 * 2 * tokens * dim * self.ffn_dim
        outside = (
            2 * tokens * (self.in_channels + self.out_channels) * self.patch_volume * dim
            + 2 * text * (self.text_dim + dim) * dim
            + 2 * (self.freq_dim + dim + 6 * dim) * dim
        )
        return self.num_layers * (self_attention + cross_attention + feed_forward) + outside


def infer_architecture(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The ``config.json`` of a single file that came without one, from the shapes of its tensors.

    Args:
        shapes: tensor name as in the original release, with or without a pack's prefix, → shape.

    Raises:
        ValueError: these aren't weights of a Wan transformer, or its heads aren't the released models' 128 wide.
    """
    marker = "patch_embedding.weight"
    prefix = next((name.removesuffix(marker) for name in shapes if name.endswith(marker)), None)
    try:
        if prefix is None:
            raise KeyError(marker)
        dim, in_channels, *patch = shapes[prefix + marker]
        head = shapes[f"{prefix}head.head.weight"][0]
        text_dim = shapes[f"{prefix}text_embedding.0.weight"][1]
        freq_dim = shapes[f"{prefix}time_embedding.0.weight"][1]
        ffn_dim = shapes[f"{prefix}blocks.0.ffn.0.weight"][0]
    except KeyError as error:
        raise ValueError(
            f"no tensor {error.args[0]} from which the shapes of a Wan transformer could be read"
        ) from error
    if dim % HEAD_DIM:
        raise ValueError(f"a model dim of {dim} is not a multiple of the released models' head dim {HEAD_DIM}")
    blocks = {
        name.removeprefix(f"{prefix}blocks.").split(".")[0] for name in shapes if name.startswith(f"{prefix}blocks.")
    }
    config = _diffusers(
        in_channels=in_channels,
        out_channels=head // math.prod(patch),
        heads=dim // HEAD_DIM,
        ffn_dim=ffn_dim,
        layers=len(blocks),
    )
    config |= {"patch_size": patch, "text_dim": text_dim, "freq_dim": freq_dim}
    if f"{prefix}img_emb.proj.0.weight" in shapes:
        positions = shapes.get(f"{prefix}img_emb.emb_pos")
        config["image_dim"] = shapes[f"{prefix}img_emb.proj.0.weight"][0]
        config["added_kv_proj_dim"] = shapes[f"{prefix}blocks.0.cross_attn.k_img.weight"][1]
        config["pos_embed_seq_len"] = None if positions is None else positions[1]
    return config


def _from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """The original release's config in diffusers' names; shapes it leaves out are those of every release."""
    fields = {ours: config[theirs] for theirs, ours in _ORIGINAL_KEYS.items() if theirs in config}
    fields["num_attention_heads"] = config["num_heads"]
    fields["attention_head_dim"] = config["dim"] // config["num_heads"]
    rest = {k: v for k, v in config.items() if k not in _ORIGINAL_KEYS and k not in _ORIGINAL_IGNORED}
    return {**fields, **rest}
