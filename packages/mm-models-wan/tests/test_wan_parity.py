"""Our transformer against ``diffusers.WanTransformer3DModel``, in fp32 with equal weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_GRADIENT, assert_gradients_near, assert_near
from wan_helpers import model_inputs, model_pair

from mm_models_wan.weights.key_map import WAN2_2

pytestmark = pytest.mark.numeric

GRID = (3, 4, 5)
CASES: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v": {"in_channels": 36},
    "ti2v": {"in_channels": 48, "out_channels": 48, "num_attention_heads": 2, "attention_head_dim": 32},
    "wan2.1-i2v": {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64},
    "no cross-attention norm": {"cross_attn_norm": False},
}


def run_both(case: str, batch: int, *, full_text: bool) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """(diffusers' model, ours, its output, ours)."""
    reference, ours = model_pair(**CASES[case])
    channels = CASES[case].get("in_channels", 16)
    per_token = case == "ti2v"
    inputs = model_inputs(batch, grid=GRID, channels=channels, per_token=per_token, full_text=full_text)
    latents, timestep, text = inputs
    if per_token:
        timestep[:, : GRID[1] * GRID[2]] = 0
    image = torch.randn(batch, 257, 24, generator=torch.Generator().manual_seed(3)) if "2.1" in case else None
    theirs = reference(latents, timestep, text, image, return_dict=False)[0]
    return reference, ours, theirs, ours(latents, timestep, text, image)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_forward_equals_diffusers(case: str, batch: int) -> None:
    _, _, theirs, mine = run_both(case, batch, full_text=False)
    assert mine.dtype == torch.float32
    assert mine.shape == theirs.shape
    assert_near(mine, theirs, FP32_BLOCK)
    assert theirs.abs().mean() > 0.1, "the comparison would be empty"


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_diffusers(case: str) -> None:
    reference, ours, theirs, mine = run_both(case, 2, full_text=True)
    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(9))
    (theirs * direction).sum().backward()
    (mine * direction).sum().backward()
    names = WAN2_2.rename_all((name for name, _ in reference.named_parameters()), to="native")
    parameters = dict(ours.named_parameters())
    assert set(names.values()) == set(parameters)
    expected = {names[name]: parameter.grad for name, parameter in reference.named_parameters()}
    assert_gradients_near({name: parameter.grad for name, parameter in parameters.items()}, expected, FP32_GRADIENT)


def test_swapped_norms_would_be_seen() -> None:
    """B005: diffusers calls the norm before cross-attention norm2, the original release norm3."""
    reference, ours = model_pair()
    with torch.no_grad():
        for theirs, mine in zip(reference.blocks, ours.blocks, strict=True):
            theirs.norm2.weight.fill_(2.0)
            mine.norm3.weight.fill_(2.0)
    latents, timestep, text = model_inputs(2, grid=GRID)
    theirs = reference(latents, timestep, text, return_dict=False)[0]
    assert_near(ours(latents, timestep, text), theirs, FP32_BLOCK)


def test_other_weights_fail_the_comparison() -> None:
    """What an expert loaded from its sibling's folder would look like."""
    reference, _ = model_pair(seed=0)
    _, ours = model_pair(seed=1)
    latents, timestep, text = model_inputs(1, grid=GRID)
    assert (ours(latents, timestep, text) - reference(latents, timestep, text, return_dict=False)[0]).abs().max() > 0.1


def test_equal_timesteps_per_token_are_one_timestep_per_sample() -> None:
    _, ours = model_pair()
    latents, timestep, text = model_inputs(2, grid=GRID)
    per_token = timestep[:, None].expand(-1, GRID[0] * GRID[1] * GRID[2])
    assert_near(ours(latents, per_token, text), ours(latents, timestep, text), FP32_BLOCK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noised": torch.zeros(1, 20, 1, 4, 4)}, "takes 16 channels, got 20"),
        ({"noised": torch.zeros(1, 16, 1, 5, 4)}, r"no multiple of the patch"),
        ({"timestep": torch.zeros(1, 3)}, "3 timesteps per sample for 4 tokens"),
        ({"image_embeds": torch.zeros(1, 257, 24)}, "takes no image embeddings"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    _, ours = model_pair()
    inputs = {"noised": torch.zeros(1, 16, 1, 4, 4), "timestep": torch.zeros(1), "context": torch.zeros(1, 512, 32)}
    with pytest.raises(ValueError, match=message):
        ours(**{**inputs, **change})
