"""The four stages together: one whole training loss equals the same quantity put together by hand."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_close import FP32_BLOCK, assert_near
from wan_helpers import SEED, build_container, make_batch, make_spec

from mm_models_wan.container import Wan22Container
from mm_models_wan.options import Wan22Options
from mm_trainer.contracts import StepContext
from mm_trainer.errors import ConfigError
from mm_trainer.randomness import keyed_normal, keyed_uniform


def reference_parts(folder: Path, transformer: str) -> tuple[Any, Any, Any, torch.Tensor, torch.Tensor]:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5EncoderModel

    vae = AutoencoderKLWan.from_pretrained(folder / "vae").eval()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    text = UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval()
    return vae, text, WanTransformer3DModel.from_pretrained(folder / transformer), mean, std


@pytest.mark.numeric
def test_t2v_loss_equals_the_one_made_by_hand(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, Wan22Options(expert="low"))
    batch = make_batch(tiny_wan, 3)
    output = container(**batch)

    vae, text, transformer, mean, std = reference_parts(tiny_wan, "transformer_2")
    grid = torch.linspace(1, 0.003 / 1.002, 1000, dtype=torch.float64)
    grid = 3 * grid / (1 + 2 * grid)
    bell = torch.exp(-2 * ((1000 * grid - 500) / 1000) ** 2)
    bell = (bell - bell.min()) / (bell - bell.min()).mean()
    inside = (grid < 0.875).nonzero().flatten().flip(0)
    losses = []
    for row in range(3):
        key = batch["sample_key"][row : row + 1]
        with torch.no_grad():
            clean = (vae.encode(batch["video"][row : row + 1]).latent_dist.mode() - mean) / std
            length = int(batch["prompt_mask"][row].sum())
            ids, mask = batch["prompt_ids"][row : row + 1], batch["prompt_mask"][row : row + 1]
            features = text(ids, mask).last_hidden_state[:, :length]
            features = torch.cat([features, torch.zeros(1, 512 - length, 32)], dim=1)
        index = inside[int(keyed_uniform(SEED, "sigma", key) * len(inside))]
        sigma = grid[index].float()
        noise = keyed_normal(SEED, "noise", key, clean.shape[1:])
        noised = (1 - sigma) * clean + sigma * noise
        prediction = transformer(noised, (1000 * sigma).view(1), features, return_dict=False)[0]
        losses.append((prediction - (noise - clean)).square().mean() * bell[index].float())
        assert output.per_sample.sigma[row] == sigma
    assert_near(output.loss, torch.stack(losses).mean(), FP32_BLOCK)
    torch.testing.assert_close(output.per_sample.loss, torch.stack(losses).detach(), rtol=FP32_BLOCK, atol=0)


def test_the_loss_reaches_the_predictor_only(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, Wan22Options(expert="low"))
    container.get_sub_models()["ae"].requires_grad_(False)
    container.get_sub_models()["text_encoder"].requires_grad_(False)
    container.train()
    assert not container.text_encoder.model.training, "the frozen encoder's dropout stays off"
    container(**make_batch(tiny_wan)).loss.backward()
    assert all(p.grad is not None for p in container.predictor.parameters())


@pytest.mark.numeric
def test_no_row_depends_on_another(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, Wan22Options(expert="high"), predictor="transformer")
    batch = make_batch(tiny_wan, 3)
    whole = container(**batch).per_sample
    for row in range(3):
        alone = container(**{name: value[row : row + 1] for name, value in batch.items()}).per_sample
        assert_near(alone.loss[0], whole.loss[row], FP32_BLOCK)
        assert alone.sigma[0] == whole.sigma[row]


@pytest.mark.numeric
def test_fixed_quantiles_fix_sigma(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, Wan22Options(noise_range=(0.2, 0.6), scheduler={"preset": "uniform"}))
    quantile = torch.tensor([0.25, 0.5], dtype=torch.float64)
    sigma = container(**make_batch(tiny_wan), quantile=quantile).per_sample.sigma
    torch.testing.assert_close(sigma, torch.tensor([0.3, 0.4]), rtol=0, atol=1e-6)


@pytest.mark.numeric
def test_posterior_samples_are_keyed_by_the_sample(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, Wan22Options(expert="low"))
    batch = make_batch(tiny_wan)
    prepare = partial(container.pipeline.prepare_conditions, container.get_sub_models(), StepContext())
    mode = prepare(batch)["latents"]
    container.ae.do_sample = True
    drawn = [prepare(batch)["latents"] for _ in range(2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], mode)
    swapped = {name: value[[1, 0]] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    assert_near(prepare(swapped)["latents"][[1, 0]], drawn[0], FP32_BLOCK)


def test_an_expert_without_a_range_is_warned_about(tiny_wan: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B082: the warning says which range it should have."""
    with caplog.at_level(logging.WARNING, logger="mm_models_wan"):
        container = build_container(tiny_wan, Wan22Options())
    message = caplog.records[-1].getMessage()
    assert "high (sigma in [0.875, 1]) or low ([0, 0.875))" in message
    assert "these weights are the low one" in message
    assert container.pipeline.describe()["noise_range"] == [0.0, 1.0]


@pytest.mark.parametrize(("expert", "expected"), [("high", [0.875, 1.0]), ("low", [0.0, 0.875])])
def test_an_experts_range_ends_at_the_models_boundary(tiny_wan: Path, expert: Any, expected: list[float]) -> None:
    assert build_container(tiny_wan, Wan22Options(expert=expert)).pipeline.describe()["noise_range"] == expected
    stated = build_container(tiny_wan, Wan22Options(expert=expert, boundary=0.9)).pipeline.describe()["noise_range"]
    assert stated == [0.9 if edge == 0.875 else edge for edge in expected]


@pytest.mark.parametrize("other", [{}, {"noise_range": (0.1, 0.9)}])
def test_a_boundary_that_nothing_reads_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"boundary: only read with expert \(high, low or both\)"):
        Wan22Options(boundary=0.9, **other)


def test_a_task_that_does_not_fit_the_weights_is_refused(tiny_wan: Path) -> None:
    """B090: both numbers and the folder."""
    with pytest.raises(ConfigError, match=r"36 channels.*transformer_2 takes 16") as caught:
        build_container(tiny_wan, Wan22Options(expert="low"), task="i2v")
    assert caught.value.key == "model.models.predictor"


def test_roles_and_task_are_checked_before_anything_is_built(tiny_wan: Path) -> None:
    specs = {"ae": make_spec("ae", "wan_video_vae"), "predictor": make_spec("predictor", "wan2_2_predictor")}
    with pytest.raises(ConfigError, match="missing: text_encoder, unknown: none"):
        Wan22Container.validate_specs(specs, Wan22Options(), "t2v")
    specs["text_encoder"] = make_spec("text_encoder", "UMT5")
    with pytest.raises(ConfigError, match="task 'v2v' is not one of: t2v, i2v, ti2v"):
        Wan22Container.validate_specs(specs, Wan22Options(), "v2v")
    Wan22Container.validate_specs(specs, Wan22Options(), "t2v")
