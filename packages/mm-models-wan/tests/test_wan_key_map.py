"""The key map, on whole models and on files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from wan_helpers import make_spec, model_inputs, model_pair

from mm_checkpoint import load_weights, resolve_source
from mm_checkpoint.config import WeightSourceConfig
from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.tiny import TRANSFORMER
from mm_models_wan.weights.architecture import WanArchitecture
from mm_models_wan.weights.key_map import WAN2_2

WAN21_I2V = {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64, "pos_embed_seq_len": 514}


@pytest.mark.parametrize("changes", [{}, WAN21_I2V])
def test_names_map_one_to_one_onto_our_model(changes: dict[str, int]) -> None:
    reference, ours = model_pair(**changes)
    names = WAN2_2.rename_all(reference.state_dict(), to="native")
    assert set(names.values()) == set(ours.state_dict())
    assert WAN2_2.rename_all(names.values(), to="source") == {native: source for source, native in names.items()}


def test_names_that_are_no_weights_are_dropped() -> None:
    for key in ("blocks.3.attn2.norm_added_q.weight", "blocks.0.attn1._extra_state", "_extra_state"):
        assert WAN2_2.to_native(key) is None


def load(folder: Path, **changes: object) -> WanPredictor:
    ours = WanPredictor(WanArchitecture.parse({**TRANSFORMER, **changes}))
    source = resolve_source(WeightSourceConfig(from_pretrained=str(folder)))
    assert source is not None
    ours.setup_weights(source)
    return ours


def test_a_diffusers_folder_loads_and_comes_back_bit_for_bit(tiny_wan: Path) -> None:
    """B005: names, dtypes and values."""
    stored = load_file(tiny_wan / "transformer" / "diffusion_pytorch_model.safetensors")
    state = load(tiny_wan / "transformer").state_dict()
    back = {WAN2_2.to_source(name): tensor for name, tensor in state.items()}
    assert back.keys() == stored.keys()
    for name, tensor in stored.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_native_files_load_with_and_without_a_packs_prefix(tmp_path: Path, prefix: str) -> None:
    _, ours = model_pair()
    save_file({prefix + name: tensor for name, tensor in ours.state_dict().items()}, tmp_path / "pack.safetensors")
    loaded = load(tmp_path / "pack.safetensors")
    inputs = model_inputs(1, grid=(1, 2, 2))
    assert torch.equal(loaded(*inputs), ours(*inputs))


def test_architecture_comes_from_the_folder(tiny_wan: Path) -> None:
    model = WanPredictor.from_config(make_spec("predictor", "wan2_2_predictor", tiny_wan / "transformer_2"))
    assert model.architecture == WanArchitecture.parse(TRANSFORMER)
    assert model.release.boundary == 0.875
    assert model.release.expert == "low"


def test_from_pretrained_loads_into_the_declared_dtype(tiny_wan: Path) -> None:
    spec = make_spec("predictor", "wan2_2_predictor", tiny_wan / "transformer", meta_init=False, dtype="bf16")
    model = WanPredictor.from_pretrained(spec)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    stored = load_file(tiny_wan / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(model.head.modulation, stored["scale_shift_table"].bfloat16())


def test_weights_of_the_other_channel_count_are_refused_by_name(tiny_wan: Path) -> None:
    ours = WanPredictor(WanArchitecture.parse({**TRANSFORMER, "in_channels": 36}))
    with pytest.raises(Exception, match=r"patch_embedding\.weight is \[64, 16, 1, 2, 2\]"):
        load_weights(ours, tiny_wan / "transformer", key_map=WAN2_2)
