"""The original release's VAE and text encoder: key maps of their ``.pth`` files, and the shapes that these don't state.

The transformers of the original release need no map: their names are ours (see `mm_models_wan.weights.key_map`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_checkpoint import KeyMap
from mm_trainer.contracts import ModelSpec

UMT5_ORIGINAL = KeyMap(
    "umt5_original",
    exact={"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"},
    rules=[
        ("blocks.{n}.norm1.{p}", "encoder.block.{n}.layer.0.layer_norm.{p}"),
        ("blocks.{n}.attn.{qkvo}.{p}", "encoder.block.{n}.layer.0.SelfAttention.{qkvo}.{p}"),
        (
            "blocks.{n}.pos_embedding.embedding.{p}",
            "encoder.block.{n}.layer.0.SelfAttention.relative_attention_bias.{p}",
        ),
        ("blocks.{n}.norm2.{p}", "encoder.block.{n}.layer.1.layer_norm.{p}"),
        ("blocks.{n}.ffn.gate.0.{p}", "encoder.block.{n}.layer.1.DenseReluDense.wi_0.{p}"),
        ("blocks.{n}.ffn.fc1.{p}", "encoder.block.{n}.layer.1.DenseReluDense.wi_1.{p}"),
        ("blocks.{n}.ffn.fc2.{p}", "encoder.block.{n}.layer.1.DenseReluDense.wo.{p}"),
    ],
)

# A residual block of the original VAE is a Sequential: norm, SiLU, conv, norm, SiLU, dropout, conv.
_RESIDUAL = [
    ("residual.0", "norm1"),
    ("residual.2", "conv1"),
    ("residual.3", "norm2"),
    ("residual.6", "conv2"),
    ("shortcut", "conv_shortcut"),
]
_VAE_EXACT = {
    f"{ours}.{p}": f"{theirs}.{p}"
    for ours, theirs in (("conv1", "quant_conv"), ("conv2", "post_quant_conv"))
    for p in ("weight", "bias")
}
_VAE_COMMON = [
    ("{side}.conv1.{p}", "{side}.conv_in.{p}"),
    ("{side}.head.0.{p}", "{side}.norm_out.{p}"),
    ("{side}.head.2.{p}", "{side}.conv_out.{p}"),
    ("{side}.middle.1.{rest*}", "{side}.mid_block.attentions.0.{rest*}"),
    *(
        (f"{{side}}.middle.{i}.{a}.{{p}}", f"{{side}}.mid_block.resnets.{i // 2}.{b}.{{p}}")
        for i in (0, 2)
        for a, b in _RESIDUAL
    ),
]


def _residual(source: str, native: str) -> list[tuple[str, str]]:
    return [(f"{source}.{a}.{{p}}", f"{native}.{b}.{{p}}") for a, b in _RESIDUAL]


def _resample(source: str, native: str) -> list[tuple[str, str]]:
    return [(f"{source}.{part}.{{rest*}}", f"{native}.{part}.{{rest*}}") for part in ("resample", "time_conv")]


def _flat_decoder() -> list[tuple[str, str]]:
    """The 2.1 decoder is one list: three residual blocks and an upsampler per resolution (none after the last)."""
    rules = []
    for index in range(15):  # 4 resolutions of 4 entries, without the last upsampler
        block, place = divmod(index, 4)
        source, native = f"decoder.upsamples.{index}", f"decoder.up_blocks.{block}"
        if place == 3:
            rules += _resample(source, f"{native}.upsamplers.0")
        else:
            rules += _residual(source, f"{native}.resnets.{place}")
    return rules


VAE_2_1_ORIGINAL = KeyMap(
    "wan_vae_2_1_original",
    exact=_VAE_EXACT,
    rules=[
        *_VAE_COMMON,
        *_residual("encoder.downsamples.{n}", "encoder.down_blocks.{n}"),
        *_resample("encoder.downsamples.{n}", "encoder.down_blocks.{n}"),
        *_flat_decoder(),
    ],
)

# In the 2.2 VAE every resolution is a list of its own, with the resampling layer last: after 2 residual blocks in the
# encoder, after 3 in the decoder.
VAE_2_2_ORIGINAL = KeyMap(
    "wan_vae_2_2_original",
    exact=_VAE_EXACT,
    rules=[
        *_VAE_COMMON,
        *_residual("encoder.downsamples.{n}.downsamples.{i}", "encoder.down_blocks.{n}.resnets.{i}"),
        *_resample("encoder.downsamples.{n}.downsamples.2", "encoder.down_blocks.{n}.downsampler"),
        *_residual("decoder.upsamples.{n}.upsamples.{i}", "decoder.up_blocks.{n}.resnets.{i}"),
        *_resample("decoder.upsamples.{n}.upsamples.3", "decoder.up_blocks.{n}.upsampler"),
    ],
)

# Statistics of the 2.2 VAE's latents, per channel, as released.
_MEAN_2_2 = """
-0.2289 -0.0052 -0.1323 -0.2339 -0.2799 0.0174 0.1838 0.1557 -0.1382 0.0542 0.2813 0.0891
0.1570 -0.0098 0.0375 -0.1825 -0.2246 -0.1207 -0.0698 0.5109 0.2665 -0.2108 -0.2158 0.2502
-0.2055 -0.0322 0.1109 0.1567 -0.0729 0.0899 -0.2799 -0.1230 -0.0313 -0.1649 0.0117 0.0723
-0.2839 -0.2083 -0.0520 0.3748 0.0152 0.1957 0.1433 -0.2944 0.3573 -0.0548 -0.1681 -0.0667
"""
_STD_2_2 = """
0.4765 1.0364 0.4514 1.1677 0.5313 0.4990 0.4818 0.5013 0.8158 1.0344 0.5894 1.0901
0.6885 0.6165 0.8454 0.4978 0.5759 0.3523 0.7135 0.6804 0.5833 1.4146 0.8986 0.5659
0.7069 0.5338 0.4889 0.4917 0.4069 0.4999 0.6866 0.4093 0.5709 0.6065 0.6415 0.4944
0.5726 1.2042 0.5458 1.6887 0.3971 1.0600 0.3943 0.5537 0.5444 0.4089 0.7468 0.7744
"""

VAE_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    # The class's own defaults are the 2.1 VAE's shapes and statistics.
    "Wan2.1-VAE": {"z_dim": 16},
    "Wan2.2-VAE": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "latents_mean": [float(value) for value in _MEAN_2_2.split()],
        "latents_std": [float(value) for value in _STD_2_2.split()],
    },
}
UMT5_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "umt5-xxl": {
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
    },
}

ORIGINAL_FILES = {
    "Wan2.1_VAE.pth": "Wan2.1-VAE",
    "Wan2.2_VAE.pth": "Wan2.2-VAE",
    "models_t5_umt5-xxl-enc-bf16.pth": "umt5-xxl",
}
"""File name in the original release → its architecture."""


def original_architecture(spec: ModelSpec) -> str | None:
    """The architecture that a file of the original release has, by the file's name; None for any other source.

    Such files don't state their shapes, and a ``config.json`` next to them belongs to the transformer.
    """
    place = spec.source.checkpoint_path or spec.source.from_pretrained
    return None if place is None else ORIGINAL_FILES.get(Path(place).name)
