"""Image-conditioned tasks: whole losses against diffusers' own conditioning, what is given and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_OP, assert_near
from wan_helpers import SEED, build_container, make_batch, model_pair

from mm_models_wan.container import Wan22Container
from mm_models_wan.options import Wan22Options
from mm_trainer.contracts import NoisedInputs, StepContext
from mm_trainer.errors import ConfigError
from mm_trainer.randomness import keyed_normal

I2V = Wan22Options(expert="low")
I2V_LAST = Wan22Options(expert="low", last_frame=True)
TI2V = Wan22Options()


def staged(container: Wan22Container, batch: dict[str, Any]) -> NoisedInputs:
    components, context = container.get_sub_models(), StepContext()
    conditions = container.pipeline.prepare_conditions(components, context, batch)
    return container.pipeline.noising(components, context, conditions, batch)


def reference_features(pipe: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Text features as diffusers' pipeline makes them, from the ids."""
    rows = []
    for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True):
        hidden = pipe.text_encoder(ids[None], mask[None]).last_hidden_state[:, : int(mask.sum())]
        rows.append(torch.cat([hidden, torch.zeros(1, 512 - hidden.shape[1], hidden.shape[2])], dim=1))
    return torch.cat(rows)


def reference_latents(pipe: Any, video: torch.Tensor) -> torch.Tensor:
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    return (pipe.vae.encode(video).latent_dist.mode() - mean) / std


def reference_condition(pipe: Any, video: torch.Tensor, *, last: bool = False) -> tuple[torch.Tensor, ...]:
    """What diffusers' image-to-video pipeline makes of the first (and last) frame of each clip, beside its start noise:
    the condition and, for 5B models, the mask of what is not given."""
    rows = []
    for clip in video.split(1):
        frames, height, width = clip.shape[2:]
        last_image = clip[:, :, -1] if last else None
        sizes = (1, pipe.vae.config.z_dim, height, width, frames)
        rows.append(pipe.prepare_latents(clip[:, :, 0], *sizes, torch.float32, "cpu", last_image=last_image)[1:])
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


@pytest.mark.numeric
@pytest.mark.parametrize("options", [I2V, I2V_LAST], ids=["first", "first and last"])
@torch.no_grad()
def test_i2v_loss_equals_the_one_made_by_hand(tiny_i2v: Path, options: Wan22Options) -> None:
    """B080: the condition's latents are normalised like the target's."""
    from diffusers import WanImageToVideoPipeline

    container = build_container(tiny_i2v, options, task="i2v")
    batch = make_batch(tiny_i2v, 2, frames=9)
    inputs = staged(container, batch)
    output = container(**batch)

    pipe = WanImageToVideoPipeline.from_pretrained(tiny_i2v)
    (condition,) = reference_condition(pipe, batch["video"], last=options.last_frame)
    assert condition.shape[1] == 20
    assert_near(inputs.conditions["image"], condition, FP32_BLOCK)

    clean = reference_latents(pipe, batch["video"])
    noise = keyed_normal(SEED, "noise", batch["sample_key"], clean.shape[1:])
    sigma = inputs.sigma.view(-1, 1, 1, 1, 1)
    model_input = torch.cat([(1 - sigma) * clean + sigma * noise, condition], dim=1)
    features = reference_features(pipe, batch)
    prediction = pipe.transformer_2(model_input, 1000 * inputs.sigma, features, return_dict=False)[0]
    losses = (prediction - (noise - clean)).square().flatten(1).mean(1) * inputs.weight
    assert_near(output.loss, losses.mean(), FP32_BLOCK)


@pytest.mark.numeric
@torch.no_grad()
def test_ti2v_loss_equals_the_one_made_by_hand(tiny_ti2v: Path) -> None:
    """B086, B087."""
    from diffusers import WanImageToVideoPipeline

    container = build_container(tiny_ti2v, TI2V, task="ti2v", predictor="transformer")
    batch = make_batch(tiny_ti2v, 2, frames=9)
    inputs = staged(container, batch)
    output = container(**batch)

    pipe = WanImageToVideoPipeline.from_pretrained(tiny_ti2v)
    condition, first_frame_mask = reference_condition(pipe, batch["video"])
    clean = reference_latents(pipe, batch["video"])
    noise = keyed_normal(SEED, "noise", batch["sample_key"], clean.shape[1:])
    sigma = inputs.sigma.view(-1, 1, 1, 1, 1)
    noised = (1 - sigma) * clean + sigma * noise
    # As the pipeline does at every step: the condition where the mask is 0, and timestep 0 for its tokens.
    model_input = (1 - first_frame_mask) * condition + first_frame_mask * noised
    timestep = torch.stack([(first_frame_mask[0, 0, :, ::2, ::2] * 1000 * s).flatten() for s in inputs.sigma])
    features = reference_features(pipe, batch)
    prediction = pipe.transformer(model_input, timestep, features, return_dict=False)[0]
    losses = (prediction - (noise - clean))[:, :, 1:].square().flatten(1).mean(1) * inputs.weight
    assert_near(output.loss, losses.mean(), FP32_BLOCK)
    torch.testing.assert_close(inputs.timestep, timestep, rtol=0, atol=0)


@pytest.mark.numeric
@torch.no_grad()
def test_ti2v_gives_the_first_frame_clean_and_leaves_it_out_of_the_loss(tiny_ti2v: Path) -> None:
    """B087: one noise tensor in input and target; a wrong prediction of the given frame costs nothing."""
    container = build_container(tiny_ti2v, TI2V, task="ti2v", predictor="transformer")
    batch = make_batch(tiny_ti2v, 2, frames=9)
    inputs = staged(container, batch)
    clean = inputs.conditions["latents"]
    alone = container.ae(batch["video"][:, :, :1])
    assert_near(inputs.noised[:, :, :1], alone, FP32_BLOCK)
    sigma = inputs.sigma.view(-1, 1, 1, 1, 1)
    assert_near(inputs.noised[:, :, 1:], (clean + sigma * inputs.target)[:, :, 1:], FP32_OP)
    per_frame = inputs.timestep.view(2, 3, -1)
    assert not per_frame[:, 0].any()
    assert torch.equal(per_frame[:, 1:], (1000 * inputs.sigma).view(2, 1, 1).expand(-1, 2, per_frame.shape[2]))

    prediction = inputs.target.clone()
    prediction[:, :, 0] += 100
    assert container.pipeline.compute_loss(prediction, inputs).loss == 0
    prediction[:, :, 1] += 1
    assert container.pipeline.compute_loss(prediction, inputs).loss > 0


@pytest.mark.numeric
@torch.no_grad()
def test_i2v_gives_frame_zero_of_the_processed_clip(tiny_i2v: Path) -> None:
    container = build_container(tiny_i2v, I2V, task="i2v")
    batch = make_batch(tiny_i2v, 1, frames=9)
    image = staged(container, batch).conditions["image"]
    mask, latents = image[:, :4], image[:, 4:]
    assert mask[:, :, 0].min() == 1
    assert not mask[:, :, 1:].any()
    alone = container.ae(batch["video"][:, :, :1])
    assert_near(latents[:, :, :1], alone, FP32_BLOCK)


@pytest.mark.numeric
@torch.no_grad()
def test_ti2v_weights_train_text_to_video_with_the_timestep_on_every_token(tiny_ti2v: Path) -> None:
    """B086: with task t2v no frame is given, and every token has the sample's timestep."""
    container = build_container(tiny_ti2v, TI2V, task="t2v", predictor="transformer")
    inputs = staged(container, make_batch(tiny_ti2v, 2, frames=9))
    torch.testing.assert_close(inputs.timestep, 1000 * inputs.sigma, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fixture", "task", "message"),
    [
        ("tiny_wan", "i2v", r"task i2v feeds the transformer 36 channels .*transformer takes 16"),
        ("tiny_i2v", "t2v", r"task t2v feeds the transformer 16 channels .*transformer takes 36"),
        ("tiny_ti2v", "i2v", r"task i2v feeds the transformer 100 channels .*transformer takes 48"),
        ("tiny_wan", "ti2v", r"own timestep, which .*transformer isn't made for"),
    ],
)
def test_a_task_that_does_not_fit_the_weights_is_refused(
    fixture: str, task: str, message: str, request: pytest.FixtureRequest
) -> None:
    """B086, B090: at build, with both numbers and the folder."""
    with pytest.raises(ConfigError, match=message) as caught:
        build_container(request.getfixturevalue(fixture), Wan22Options(), task=task, predictor="transformer")
    assert caught.value.key == "model.models.predictor"


def test_a_single_frame_has_nothing_to_train_in_ti2v(tiny_ti2v: Path) -> None:
    container = build_container(tiny_ti2v, TI2V, task="ti2v", predictor="transformer")
    with pytest.raises(ValueError, match="more than one latent frame"):
        container(**make_batch(tiny_ti2v, 1, frames=1))


def test_wan21_models_read_image_embeddings_from_the_batch(tiny_i2v: Path) -> None:
    """B050's kind of model: 257 image tokens beside the text."""
    container = build_container(tiny_i2v, I2V, task="i2v")
    _, predictor = model_pair(in_channels=36, image_dim=24, added_kv_proj_dim=64)
    container.predictor = predictor
    batch = make_batch(tiny_i2v, 2, frames=5)
    with pytest.raises(ValueError, match="needs image embeddings"):
        container(**batch)
    first = container(**batch, image_embeds=torch.randn(2, 257, 24)).loss
    second = container(**batch, image_embeds=torch.randn(2, 257, 24)).loss
    assert first != second
