"""VAE and text encoder against diffusers and transformers, and what the wrappers add."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_OP, assert_near
from wan_helpers import make_spec

from mm_models_wan.modules.text_encoder import PromptTokenizer, UMT5TextEncoder, clean_prompt
from mm_models_wan.modules.vae import WanVideoVAE
from mm_models_wan.tiny import random_clips
from mm_trainer.errors import ConfigError


@pytest.fixture(scope="module")
def ae(tiny_wan: Path) -> WanVideoVAE:
    return WanVideoVAE.from_pretrained(make_spec("ae", "wan_video_vae", tiny_wan / "vae", meta_init=False))


@pytest.fixture(scope="module")
def encoder(tiny_wan: Path) -> UMT5TextEncoder:
    return UMT5TextEncoder.from_pretrained(make_spec("text_encoder", "UMT5", tiny_wan / "text_encoder"))


@pytest.fixture(scope="module")
def tokenizer(tiny_wan: Path) -> PromptTokenizer:
    return PromptTokenizer(str(tiny_wan / "tokenizer"))


def clips(count: int = 2, frames: int = 9) -> torch.Tensor:
    return random_clips(count, frames=frames, height=48, width=64, generator=torch.Generator().manual_seed(5))


def by_hand(folder: Path, video: torch.Tensor) -> tuple[torch.Tensor, Any]:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        return (vae.encode(video).latent_dist.mode() - mean) / std, vae


@pytest.mark.numeric
def test_latents_are_normalised_by_the_vaes_own_statistics(tiny_wan: Path, ae: WanVideoVAE) -> None:
    """B080."""
    video = clips()
    expected, _ = by_hand(tiny_wan / "vae", video)
    latents = ae(video)
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    assert_near(latents, expected, FP32_BLOCK)
    assert 0.7 < latents.std().item() < 1.4
    assert latents.shape[1:] == ae.latent_shape(video.shape)


@pytest.mark.numeric
def test_statistics_in_the_config_take_effect(tiny_wan: Path, ae: WanVideoVAE) -> None:
    """B080."""
    config = {**ae.model.config, "latents_mean": [1.0] * 16, "latents_std": [2.0] * 16}
    changed = WanVideoVAE(config)
    changed.model.load_state_dict(ae.model.state_dict())
    raw = ae.model.encode(clips()).latent_dist.mode()
    assert_near(changed(clips()), (raw - 1) / 2, FP32_OP)


@pytest.mark.numeric
def test_decoding_reverses_the_normalisation(tiny_wan: Path, ae: WanVideoVAE) -> None:
    latents, vae = by_hand(tiny_wan / "vae", clips())
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        expected = vae.decode(latents * std + mean).sample
    assert_near(ae.decode(latents), expected, FP32_BLOCK)


@pytest.mark.numeric
def test_noise_draws_from_the_posterior(ae: WanVideoVAE) -> None:
    noise = torch.randn(2, *ae.latent_shape(clips().shape), generator=torch.Generator().manual_seed(0))
    posterior = ae.model.encode(clips()).latent_dist
    std = torch.tensor(ae.model.config.latents_std).view(1, -1, 1, 1, 1)
    assert_near(ae(clips(), noise), ae(clips()) + posterior.std * noise / std, FP32_BLOCK)


@pytest.mark.parametrize("frames", [8, 10, 12])
def test_frames_that_the_vae_would_drop_are_refused(ae: WanVideoVAE, frames: int) -> None:
    with pytest.raises(ValueError, match=f"{frames} frames of 48x64 doesn't fit"):
        ae(clips(1, frames))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_vaes_dtype_is_used(tiny_wan: Path, dtype: str) -> None:
    """B081: the setting of ae, and nobody else's, decides what the convolutions compute in."""
    spec = make_spec("ae", "wan_video_vae", tiny_wan / "vae", meta_init=False, dtype=dtype)
    model = WanVideoVAE.from_pretrained(spec)
    seen = set()
    model.model.encoder.conv_in.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    latents = model(clips(1, 1))
    assert seen == {torch.float32 if dtype == "fp32" else torch.bfloat16}
    assert latents.dtype == torch.float32


@pytest.mark.numeric
def test_slicing_changes_nothing(tiny_wan: Path, ae: WanVideoVAE) -> None:
    sliced = WanVideoVAE.from_pretrained(make_spec("ae", "wan_video_vae", tiny_wan / "vae", options={"slicing": True}))
    assert_near(sliced(clips()), ae(clips()), FP32_BLOCK)
    assert sliced.model.use_slicing


@pytest.mark.numeric
def test_text_features_equal_transformers(tiny_wan: Path, encoder: UMT5TextEncoder, tokenizer: PromptTokenizer) -> None:
    """B077: 512 positions, exactly zero past the prompt's end, equal to the reference before it."""
    from transformers import UMT5EncoderModel

    batch = tokenizer(["a cat"])
    length = int(batch["prompt_mask"].sum())
    reference = UMT5EncoderModel.from_pretrained(tiny_wan / "text_encoder").eval()
    expected = reference(batch["prompt_ids"], batch["prompt_mask"]).last_hidden_state
    features = encoder(**batch)
    assert features.shape == (1, 512, 32)
    assert not features[:, length:].any()
    assert_near(features[:, :length], expected[:, :length], FP32_BLOCK)

    junk = batch["prompt_ids"].masked_fill(batch["prompt_mask"] == 0, 17)
    assert torch.equal(encoder(junk, batch["prompt_mask"]), features)


@pytest.mark.numeric
def test_rows_are_zeroed_at_their_own_prompts_end(encoder: UMT5TextEncoder, tokenizer: PromptTokenizer) -> None:
    """B078: any order of lengths; every row equals its own batch of one, to what another batch size rounds."""
    prompts = ["abcd", "a longer one", "", "the quick brown fox jumps over the lazy dog"]
    batch = tokenizer(prompts)
    batch["prompt_mask"][2] = 0  # no token at all, not even the end mark
    features = encoder(**batch)
    assert torch.isfinite(features).all()
    for row in range(len(prompts)):
        alone = encoder(**{name: value[row : row + 1] for name, value in batch.items()})
        assert_near(features[row], alone[0], FP32_BLOCK)
        assert not features[row, int(batch["prompt_mask"][row].sum()) :].any()


def test_the_shared_table_loads_and_stays_tied(encoder: UMT5TextEncoder, tiny_wan: Path) -> None:
    """B029: the file holds shared.weight only."""
    assert encoder.model.encoder.embed_tokens.weight is encoder.model.shared.weight
    with torch.device("meta"):
        on_meta = UMT5TextEncoder.from_config(make_spec("text_encoder", "UMT5", tiny_wan / "text_encoder"))
    assert on_meta.model.encoder.embed_tokens.weight is on_meta.model.shared.weight


def test_an_encoder_set_to_another_length_says_so(encoder: UMT5TextEncoder) -> None:
    ids = torch.ones(1, 77, dtype=torch.int64)
    with pytest.raises(ValueError, match="77 positions, the encoder is set to 512"):
        encoder(ids, ids)


def test_attention_implementation_is_honoured_or_refused(tiny_wan: Path) -> None:
    folder = tiny_wan / "text_encoder"
    eager = UMT5TextEncoder.from_config(make_spec("text_encoder", "UMT5", folder, attn_implementation="eager"))
    assert eager.model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="sdpa or eager, got 'flash_attention_2'"):
        UMT5TextEncoder.from_config(make_spec("te", "UMT5", folder, attn_implementation="flash_attention_2"))


def test_prompts_are_cleaned_as_the_reference_does() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for text in ["  a\n cat &amp;amp; dog ", "donâ€™t", "&lt;b&gt;", "x\u3000y", "", "nan", "plain"]:
        assert clean_prompt(text) == prompt_clean(text)


def test_tokens_equal_the_reference_pipelines(tiny_wan: Path, tokenizer: PromptTokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny_wan / "tokenizer")
    expected = reference(["A cat & a dog"], padding="max_length", max_length=512, return_tensors="pt")
    got = tokenizer(["A  cat &amp; a dog\n"])
    assert torch.equal(got["prompt_ids"], expected["input_ids"])
    assert torch.equal(got["prompt_mask"], expected["attention_mask"])
    assert got["prompt_ids"][0, int(got["prompt_mask"].sum()) - 1] == reference.eos_token_id


def test_long_prompts_are_cut_and_counted(tiny_wan: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B077, B098: the end mark survives; a warning at the first, not at every one."""
    tokenizer = PromptTokenizer(str(tiny_wan / "tokenizer"), text_length=16)
    with caplog.at_level(logging.WARNING, logger="mm_models_wan"):
        for _ in range(3):
            batch = tokenizer(["x" * 100, "short"])
    assert batch["prompt_ids"].shape == (2, 16)
    assert batch["prompt_ids"][0, -1] == 1
    assert tokenizer.truncated == 3
    assert [record.getMessage() for record in caplog.records] == [
        "1 prompts so far are longer than 16 tokens and were cut"
    ]


def test_the_tokenise_step_travels_to_workers(tokenizer: PromptTokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert torch.equal(copy(["a cat"])["prompt_ids"], tokenizer(["a cat"])["prompt_ids"])
