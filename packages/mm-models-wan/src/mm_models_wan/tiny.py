"""A tiny Wan2.2 pipeline folder with random weights, for demonstrations and tests.

It has the layout, the classes and the key names of a released one and is read by ``diffusers.WanPipeline``; only the
sizes differ.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_models_wan.weights.architecture import TINY_TEXT_DIM
from mm_models_wan.weights.release import BOUNDARIES

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TINY_TEXT_DIM,
    "freq_dim": 256,
    "ffn_dim": 128,
    "num_layers": 2,
}
VAE: dict[str, Any] = {"base_dim": 4, "z_dim": 16, "num_res_blocks": 1}
VAE_TI2V: dict[str, Any] = {
    **VAE,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}


def write_tiny_pipeline(
    folder: str | Path,
    *,
    task: Literal["t2v", "i2v", "ti2v"] = "t2v",
    seed: int = 0,
    boundary_ratio: float | None = None,
) -> Path:
    """Write ``model_index.json`` and the folders transformer, transformer_2, vae, text_encoder, tokenizer, scheduler.

    The VAE's ``latents_mean`` and ``latents_std`` are measured on random clips, so that the latents of a clip have a
    standard deviation near 1.

    Args:
        folder: is created; files in it are overwritten.
        task: ``t2v`` and ``i2v`` have the shape of the A14B models (two experts; 16 or 36 input channels), ``ti2v``
            that of the 5B one (one transformer, 48 channels, a VAE of stride 16).
        seed: of the random weights; equal seeds give equal files.
        boundary_ratio: σ at which ``transformer`` (high noise) hands over to ``transformer_2``; by default the released
            models'.

    Returns:
        the folder.
    """
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(**(VAE_TI2V if task == "ti2v" else VAE)).eval()
        calibrate_latents(vae)
        components = {
            "vae": vae,
            "tokenizer": _tokenizer(),
            "text_encoder": _text_encoder(),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0 if task == "ti2v" else 3.0
            ),
            "transformer": _transformer(task),
        }
        if task == "ti2v":
            pipeline = WanPipeline(**components, expand_timesteps=True)
        elif task == "i2v":
            boundary = boundary_ratio or BOUNDARIES["I2V-A14B"]
            pipeline = WanImageToVideoPipeline(**components, transformer_2=_transformer(task), boundary_ratio=boundary)
        else:
            boundary = boundary_ratio or BOUNDARIES["T2V-A14B"]
            pipeline = WanPipeline(**components, transformer_2=_transformer(task), boundary_ratio=boundary)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _transformer(task: str) -> Any:
    from diffusers import WanTransformer3DModel

    channels = {"i2v": {"in_channels": 36}, "ti2v": {"in_channels": 48, "out_channels": 48}}.get(task, {})
    return WanTransformer3DModel(**{**TRANSFORMER, **channels})


def _text_encoder() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(_vocabulary()), d_model=TINY_TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    return UMT5EncoderModel(config).eval()


def _tokenizer() -> Any:
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=_vocabulary(), extra_ids=0)


def _vocabulary() -> list[tuple[str, float]]:
    """Special tokens and single characters: any English prompt has tokens, and none needs a vocabulary file."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return special + [(character, -3.0) for character in string.printable.strip()]


@torch.no_grad()
def calibrate_latents(vae: AutoencoderKLWan, *, clips: int = 8, frames: int = 9, size: int = 64) -> None:
    """Set the VAE's ``latents_mean`` and ``latents_std`` to what it makes of random clips."""
    latents = vae.encode(random_clips(clips, frames=frames, height=size, width=size)).latent_dist.mode()
    dims = (0, 2, 3, 4)
    mean, std = latents.mean(dims), latents.std(dims)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def random_clips(
    count: int, *, frames: int, height: int, width: int, generator: torch.Generator | None = None
) -> Tensor:
    """Smooth moving blobs of random colour with a little grain: (count, 3, frames, height, width) in [−1, 1]."""
    coarse = torch.randn(count, 3, max(2, frames // 4), 4, 4, generator=generator)
    grain = torch.randn(count, 3, frames, height, width, generator=generator)
    smooth = F.interpolate(coarse, size=(frames, height, width), mode="trilinear", align_corners=True)
    return (0.6 * smooth + 0.05 * grain).clamp(-1, 1)
