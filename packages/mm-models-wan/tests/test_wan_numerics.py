"""Properties of our transformer that no comparison in fp32 shows: precision, initialisation, tables, counts."""

from __future__ import annotations

import math

import pytest
import torch
from numbers_close import BF16_BLOCK
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from wan_helpers import model_inputs, model_pair

from mm_models_wan.modules.functional import sinusoid
from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.modules.rope import RotaryTables, axis_dims
from mm_models_wan.tiny import TRANSFORMER
from mm_models_wan.weights.architecture import ARCHITECTURES, WanArchitecture
from mm_parallel import KeyedInitializer

pytestmark = pytest.mark.numeric

GRID = (2, 3, 4)


@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
def test_bf16_stays_near_fp32(residual_dtype: str) -> None:
    """B046: all weights in bf16, norms, modulation and rotation in fp32, output fp32."""
    _, ours = model_pair()
    latents, timestep, text = model_inputs(2, grid=GRID)
    expected = ours(latents, timestep, text)
    ours.residual_dtype = residual_dtype
    got = ours.to(torch.bfloat16)(latents, timestep, text)
    assert got.dtype == torch.float32
    assert ((got - expected).norm() / expected.norm()).item() < BF16_BLOCK


def test_timesteps_reach_the_sinusoid_unrounded() -> None:
    """In bf16 731 and 732 are one number."""
    _, ours = model_pair()
    ours.to(torch.bfloat16)
    latents, _, text = model_inputs(1, grid=GRID)
    first, second = (ours(latents, torch.tensor([t]), text) for t in (731.0, 732.0))
    assert not torch.equal(first, second)


def test_sinusoid_has_cosines_first_and_float64_angles() -> None:
    timestep = torch.tensor([0.0, 999.0, 731.25])
    got = sinusoid(timestep, 256)
    for row, t in enumerate(timestep.tolist()):
        for i in (0, 1, 64, 127):
            angle = t * 10000 ** (-i / 128)
            assert got[row, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert got[row, 128 + i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotary_dims_and_angles() -> None:
    assert axis_dims(128) == (44, 42, 42)
    assert axis_dims(16) == (8, 4, 4)
    cos, sin = RotaryTables(128, 1024)((2, 3, 4), torch.device("cpu"))
    assert cos.shape == (1, 24, 1, 64)
    token = (1 * 3 + 2) * 4 + 3  # frame 1, row 2, column 3
    for pair, angle in ((0, 1.0), (5, 10000 ** (-10 / 44)), (22, 2.0), (24, 2 * 10000 ** (-4 / 42)), (43, 3.0)):
        assert cos[0, token, 0, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[0, token, 0, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotary_tables_are_made_once_per_grid() -> None:
    tables = RotaryTables(16, 1024, capacity=2)
    first = tables((2, 3, 4), torch.device("cpu"))
    assert tables((2, 3, 4), torch.device("cpu"))[0] is first[0]
    for frames in (3, 4):
        tables((frames, 3, 4), torch.device("cpu"))
    assert tables((2, 3, 4), torch.device("cpu"))[0] is not first[0]
    with pytest.raises(ValueError, match="exceeds the rotary table's 1024 positions"):
        tables((1, 1025, 1), torch.device("cpu"))


def test_a_table_made_under_inference_mode_serves_training() -> None:
    _, ours = model_pair()
    latents, timestep, text = model_inputs(1, grid=GRID)
    with torch.inference_mode():
        ours(latents, timestep, text)
    ours(latents, timestep, text).sum().backward()


def test_the_model_has_no_buffers() -> None:
    """B027: nothing that a meta build could leave as garbage."""
    _, ours = model_pair()
    assert not list(ours.buffers())


def test_fresh_weights_follow_the_rule_and_predict_zero() -> None:
    model = WanPredictor(WanArchitecture.parse(TRANSFORMER))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.init_weights(KeyedInitializer(0), "predictor.")
    weights = dict(model.named_parameters())
    assert all(torch.isfinite(w).all() for w in weights.values())
    dim, inputs = 64, 16 * 4
    assert weights["patch_embedding.weight"].abs().max().item() <= math.sqrt(6 / (dim + inputs))
    bound = math.sqrt(6 / (dim + 128))
    assert 0.9 * bound < weights["blocks.0.ffn.0.weight"].abs().max().item() <= bound
    assert weights["time_projection.1.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["text_embedding.0.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.1.modulation"].std().item() == pytest.approx(dim**-0.5, rel=0.2)
    assert torch.equal(weights["blocks.0.norm3.weight"], torch.ones(dim))
    assert torch.equal(weights["blocks.0.self_attn.norm_q.weight"], torch.ones(dim))
    assert not any(w.any() for name, w in weights.items() if name.endswith(".bias"))

    output = model(*model_inputs(1, grid=GRID))
    assert not output.any()
    output.sum().backward()
    assert {name for name, w in weights.items() if w.grad.any()} == {"head.head.weight", "head.head.bias"}


@pytest.mark.parametrize(("name", "billions"), [("T2V-A14B", 14.288), ("I2V-A14B", 14.289), ("TI2V-5B", 5.000)])
def test_parameter_counts_of_the_named_architectures(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = WanPredictor(WanArchitecture.parse({**ARCHITECTURES[name], "num_layers": 1}))
    total = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    layers = ARCHITECTURES[name]["num_layers"]
    assert (total + (layers - 1) * block) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_flops_equal_what_torch_counts() -> None:
    _, ours = model_pair()
    latents, timestep, text = model_inputs(1, grid=GRID)
    # Of the attention kernels the counter knows the decomposed one, whatever the machine.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(latents, timestep, text)
    assert ours.flops(latents.shape[1:]) == counter.get_total_flops()


def test_both_releases_configs_are_read() -> None:
    original = {
        "_class_name": "WanModel",
        "_diffusers_version": "0.33.0",
        "dim": 5120,
        "eps": 1e-06,
        "ffn_dim": 13824,
        "freq_dim": 256,
        "in_dim": 16,
        "model_type": "t2v",
        "num_heads": 40,
        "num_layers": 40,
        "out_dim": 16,
        "text_len": 512,
    }
    assert WanArchitecture.parse(original) == WanArchitecture.parse(ARCHITECTURES["T2V-A14B"])
    with pytest.raises(ValueError, match=r"unknown keys \['vace_layers'\]"):
        WanArchitecture.parse({**ARCHITECTURES["T2V-A14B"], "vace_layers": [0]})
