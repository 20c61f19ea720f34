"""Weights as the original release and single-file packs have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from wan_helpers import make_spec, model_inputs, model_pair

from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.modules.text_encoder import UMT5TextEncoder
from mm_models_wan.modules.vae import WanVideoVAE
from mm_models_wan.tiny import VAE, VAE_TI2V, random_clips
from mm_models_wan.weights.architecture import ARCHITECTURES, WanArchitecture, infer_architecture
from mm_models_wan.weights.key_map import WAN2_2
from mm_models_wan.weights.original import UMT5_ORIGINAL, VAE_2_1_ORIGINAL, VAE_2_2_ORIGINAL
from mm_trainer.contracts import ModelSpec

RELEASED = {"num_attention_heads": 1, "attention_head_dim": 128, "ffn_dim": 160, "num_layers": 3}


def vae_with(shapes: dict[str, Any]) -> Any:
    from diffusers import AutoencoderKLWan

    statistics = {"latents_mean": [0.0] * shapes["z_dim"], "latents_std": [1.0] * shapes["z_dim"]}
    return AutoencoderKLWan(**{**shapes, **statistics, "num_res_blocks": 2}).eval()


def to_original(state: dict[str, torch.Tensor], key_map: Any) -> dict[str, torch.Tensor]:
    return {key_map.to_source(name): tensor for name, tensor in state.items()}


def test_vae_2_1_names_agree_with_diffusers_conversion() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    state = vae_with(VAE).state_dict()
    converted = convert_wan_vae_to_diffusers(to_original(state, VAE_2_1_ORIGINAL))
    assert converted.keys() == state.keys()
    for name, tensor in state.items():
        assert converted[name] is tensor, name


@pytest.mark.parametrize(
    ("original", "name"),
    [
        ("conv1.weight", "quant_conv.weight"),
        ("encoder.downsamples.0.downsamples.1.residual.6.bias", "encoder.down_blocks.0.resnets.1.conv2.bias"),
        ("encoder.downsamples.1.downsamples.0.shortcut.weight", "encoder.down_blocks.1.resnets.0.conv_shortcut.weight"),
        ("encoder.downsamples.1.downsamples.2.time_conv.weight", "encoder.down_blocks.1.downsampler.time_conv.weight"),
        ("encoder.downsamples.0.downsamples.2.resample.1.bias", "encoder.down_blocks.0.downsampler.resample.1.bias"),
        ("decoder.upsamples.2.upsamples.3.resample.1.weight", "decoder.up_blocks.2.upsampler.resample.1.weight"),
        ("decoder.upsamples.3.upsamples.2.residual.0.gamma", "decoder.up_blocks.3.resnets.2.norm1.gamma"),
        ("decoder.middle.1.to_qkv.bias", "decoder.mid_block.attentions.0.to_qkv.bias"),
        ("decoder.head.2.weight", "decoder.conv_out.weight"),
    ],
)
def test_vae_2_2_names(original: str, name: str) -> None:
    assert VAE_2_2_ORIGINAL.to_native(original) == name


@pytest.mark.numeric
@pytest.mark.parametrize(("shapes", "key_map"), [(VAE, VAE_2_1_ORIGINAL), (VAE_TI2V, VAE_2_2_ORIGINAL)])
def test_a_vae_pth_gives_the_same_latents(tmp_path: Path, shapes: dict[str, Any], key_map: Any) -> None:
    reference = vae_with(shapes)
    torch.save(to_original(reference.state_dict(), key_map), tmp_path / "vae.pth")
    spec = make_spec("ae", "wan_video_vae", tmp_path / "vae.pth", architecture=dict(reference.config))
    video = random_clips(1, frames=5, height=32, width=32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(WanVideoVAE.from_pretrained(spec)(video), reference.encode(video).latent_dist.mode())


def test_umt5_names(tiny_wan: Path) -> None:
    expected = {
        "token_embedding.weight": "shared.weight",
        "norm.weight": "encoder.final_layer_norm.weight",
        "blocks.1.norm1.weight": "encoder.block.1.layer.0.layer_norm.weight",
        "blocks.1.norm2.weight": "encoder.block.1.layer.1.layer_norm.weight",
        "blocks.0.pos_embedding.embedding.weight": (
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ),
        "blocks.0.attn.o.weight": "encoder.block.0.layer.0.SelfAttention.o.weight",
        "blocks.0.ffn.gate.0.weight": "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
        "blocks.0.ffn.fc1.weight": "encoder.block.0.layer.1.DenseReluDense.wi_1.weight",
        "blocks.0.ffn.fc2.weight": "encoder.block.0.layer.1.DenseReluDense.wo.weight",
    }
    assert {name: UMT5_ORIGINAL.to_native(name) for name in expected} == expected


@pytest.mark.numeric
def test_a_umt5_pth_gives_the_same_features(tiny_wan: Path, tmp_path: Path) -> None:
    folder = tiny_wan / "text_encoder"
    torch.save(to_original(load_file(folder / "model.safetensors"), UMT5_ORIGINAL), tmp_path / "t5.pth")
    config = json.loads((folder / "config.json").read_text())
    spec = make_spec("text_encoder", "UMT5", tmp_path / "t5.pth", architecture=config)
    ids = torch.randint(3, 90, (2, 512), generator=torch.Generator().manual_seed(0))
    expected = UMT5TextEncoder.from_pretrained(make_spec("text_encoder", "UMT5", folder))
    assert torch.equal(UMT5TextEncoder.from_pretrained(spec)(ids, ids * 0 + 1), expected(ids, ids * 0 + 1))


@pytest.mark.parametrize(
    ("model", "file", "architecture"),
    [
        (WanVideoVAE, "Wan2.1_VAE.pth", {"z_dim": 16}),
        (WanVideoVAE, "Wan2.2_VAE.pth", {"z_dim": 48, "scale_factor_spatial": 16}),
        (UMT5TextEncoder, "models_t5_umt5-xxl-enc-bf16.pth", {"d_model": 4096, "num_layers": 24}),
    ],
)
def test_released_files_are_recognised_by_name(
    tmp_path: Path, model: Any, file: str, architecture: dict[str, int]
) -> None:
    """Not by the config.json beside them, which is the transformer's."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 5120}))
    (tmp_path / file).touch()
    read = model.read_architecture(make_spec("x", "UMT5", tmp_path / file))
    assert read.items() >= architecture.items()
    assert len(WanVideoVAE.architectures["Wan2.2-VAE"]["latents_mean"]) == 48
    assert len(WanVideoVAE.architectures["Wan2.2-VAE"]["latents_std"]) == 48


def write_original_release(folder: Path) -> tuple[Any, WanPredictor]:
    """``high_noise_model/`` as the original release has it: its config, native names, diffusers' file name."""
    reference, ours = model_pair(**RELEASED)
    place = folder / "high_noise_model"
    place.mkdir()
    config = {"_class_name": "WanModel", "_diffusers_version": "0.33.0", "dim": 128, "num_heads": 1, "ffn_dim": 160}
    config |= {"in_dim": 16, "out_dim": 16, "num_layers": 3, "freq_dim": 256, "eps": 1e-6, "model_type": "t2v"}
    config |= {"text_len": 512, "text_dim": 32}
    (place / "config.json").write_text(json.dumps(config))
    save_file(ours.state_dict(), place / "diffusion_pytorch_model.safetensors")
    return reference, ours


def predict_both(spec: ModelSpec, ours: WanPredictor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = model_inputs(1, grid=(1, 2, 3))
    return WanPredictor.from_pretrained(spec)(*inputs), ours(*inputs)


def test_the_original_releases_folder_loads(tmp_path: Path) -> None:
    _, ours = write_original_release(tmp_path)
    spec = make_spec("predictor", "wan2_2_predictor", tmp_path / "high_noise_model")
    assert torch.equal(*predict_both(spec, ours))
    assert WanPredictor.from_config(spec).release.expert == "high"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_states_its_shapes_itself(tmp_path: Path, prefix: str) -> None:
    _, ours = model_pair(**RELEASED)
    pack = tmp_path / "wan_pack.safetensors"
    save_file({prefix + name: tensor for name, tensor in ours.state_dict().items()}, pack)
    assert torch.equal(*predict_both(make_spec("predictor", "wan2_2_predictor", pack), ours))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shapes_of_the_released_models_are_inferred(name: str) -> None:
    with torch.device("meta"):
        model = WanPredictor(WanArchitecture.parse({**ARCHITECTURES[name], "num_layers": 2}))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert WanArchitecture.parse(infer_architecture(shapes)) == model.architecture


def test_other_files_are_no_wan_transformer() -> None:
    with pytest.raises(ValueError, match=r"no tensor patch_embedding\.weight"):
        infer_architecture({"transformer_blocks.0.weight": (4, 4)})
    with pytest.raises(ValueError, match="a model dim of 64 is not a multiple"):
        _, ours = model_pair()
        infer_architecture({key: tuple(value.shape) for key, value in ours.state_dict().items()})


@pytest.mark.parametrize("changes", [{}, {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64}])
def test_native_names_go_back_through_diffusers_own_conversion(changes: dict[str, int]) -> None:
    """What a native export is: diffusers' single-file conversion gives back the same weights."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    reference, ours = model_pair(**changes)
    converted = convert_wan_transformer_to_diffusers(dict(ours.state_dict()))
    expected = reference.state_dict()
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    assert {WAN2_2.to_source(name) for name in ours.state_dict()} == expected.keys()
