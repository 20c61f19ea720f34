"""Clips from folders, with the settings that the models are sampled with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mm_models_wan.sampling import RELEASED_SETTINGS, SampleRequest, WanSampler, WanSamplerOptions
from mm_trainer.commands.sample import describe_options, parse_options
from mm_trainer.errors import InputError

SIZE = {"height": 32, "width": 64, "frames": 5, "steps": 3}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.effect_noise((90, 50), 80).convert("RGB").save(tmp_path / "first.png")
    return tmp_path / "first.png"


def recorded(sampler: WanSampler, name: str) -> list[float]:
    """Timesteps that a transformer is called with from now on."""
    seen: list[float] = []
    model = getattr(sampler._text, name)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(float(kwargs["timestep"].max())), with_kwargs=True
    )
    return seen


def test_both_experts_sample_on_their_side_of_the_boundary(tiny_wan: Path) -> None:
    sampler = WanSampler(tiny_wan, dtype="fp32")
    assert sampler.settings == RELEASED_SETTINGS["T2V-A14B"]
    assert sampler._text.scheduler.config.flow_shift == 12.0
    high, low = recorded(sampler, "transformer"), recorded(sampler, "transformer_2")
    clip = sampler(SampleRequest("a cat", **{**SIZE, "steps": 12}))
    assert clip.shape == (3, 5, 32, 64)
    assert 0 <= clip.min() <= clip.max() <= 1
    assert high
    assert low
    assert min(high) >= 875 > max(low)


def test_a_seed_makes_the_clip(tiny_wan: Path) -> None:
    sampler = WanSampler(tiny_wan, dtype="fp32")
    first, again, other = (sampler(SampleRequest("a cat", seed=seed, **SIZE)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_transformer_from_elsewhere_is_used(tiny_wan: Path) -> None:
    plain = WanSampler(tiny_wan, dtype="fp32")
    swapped = WanSampler(
        tiny_wan, transformer=tiny_wan / "transformer_2", transformer_2=tiny_wan / "transformer", dtype="fp32"
    )
    request = SampleRequest("a cat", **SIZE)
    assert not torch.equal(plain(request), swapped(request))


@pytest.mark.parametrize("last", [False, True])
def test_image_to_video_starts_from_the_image(tiny_i2v: Path, picture: Path, last: bool) -> None:
    sampler = WanSampler(tiny_i2v, dtype="fp32")
    assert sampler.settings == RELEASED_SETTINGS["I2V-A14B"]
    request = SampleRequest("a cat", image=picture, last_image=picture if last else None, **SIZE)
    assert sampler(request).shape == (3, 5, 32, 64)


@pytest.mark.parametrize("with_image", [False, True])
def test_ti2v_samples_with_and_without_an_image(tiny_ti2v: Path, picture: Path, with_image: bool) -> None:
    sampler = WanSampler(tiny_ti2v, dtype="fp32")
    assert sampler.settings == RELEASED_SETTINGS["TI2V-5B"]
    clip = sampler(SampleRequest("a cat", image=picture if with_image else None, **SIZE))
    assert clip.shape == (3, 5, 32, 64)


def test_images_that_do_not_fit_the_model_are_refused(tiny_wan: Path, tiny_i2v: Path, picture: Path) -> None:
    size: dict[str, Any] = SIZE
    with pytest.raises(InputError, match="image-to-video model: a request needs an image"):
        WanSampler(tiny_i2v, dtype="fp32")(SampleRequest("a cat", **size))
    text = WanSampler(tiny_wan, dtype="fp32")
    with pytest.raises(InputError, match="text-to-video model: a request can't have an image"):
        text(SampleRequest("a cat", image=picture, **size))
    with pytest.raises(InputError, match=r"no model_index\.json"):
        WanSampler(tiny_wan / "vae")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"height": 50}, "height 50: .* makes multiples of 16, such as 64"),
        ({"width": 70}, "width 70: .* such as 80"),
        ({"frames": 8}, r"frames 8: .* makes 4·k \+ 1, such as 5"),
    ],
)
def test_sizes_that_the_model_cannot_make_are_refused(tiny_wan: Path, size: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WanSampler(tiny_wan, dtype="fp32")(SampleRequest("a cat", **{**SIZE, **size}))


class Stopped(Exception):
    """The pipeline was called; nothing need be computed."""


def test_the_low_noise_expert_has_a_guidance_of_its_own(tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option reaches diffusers' pipeline, and without it the released setting does."""
    for options, expected in ((WanSamplerOptions(guidance_low=1.5), 1.5), (WanSamplerOptions(), 3.0)):
        sampler, seen = WanSampler(tiny_wan, dtype="fp32", options=options), {}

        def record(self: Any, seen: dict[str, Any] = seen, **arguments: Any) -> None:
            seen.update(arguments)
            raise Stopped

        monkeypatch.setattr(type(sampler._text), "__call__", record)
        with pytest.raises(Stopped):
            sampler(SampleRequest("a cat", **SIZE))
        assert (seen["guidance_scale"], seen["guidance_scale_2"]) == (4.0, expected)


def test_options_are_listed_and_parsed_before_any_weights_are_read() -> None:
    assert describe_options(WanSampler) == [
        "--option guidance_low=VALUE  Guidance of the low-noise expert, where there are two; default: the released "
        "model's."
    ]
    assert parse_options(WanSampler, ["guidance_low=2"]) == WanSamplerOptions(guidance_low=2.0)
    for pair, said in (
        ("guidance_low", "expected KEY=VALUE"),
        ("guidance_lwo=1", "no such option; did you mean guidance_low"),
        ("guidance_low=high", "--option guidance_low: Input should be a valid number"),
    ):
        with pytest.raises(InputError, match=said):
            parse_options(WanSampler, [pair])
