"""`features.compile_plan` on the blocks: each is one graph and computes the same."""

from __future__ import annotations

import shutil

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_GRADIENT, assert_gradients_near, assert_near
from torch import nn
from torch._dynamo.utils import counters
from wan_helpers import model_inputs, model_pair

from mm_parallel import CompilePlan, FeaturesConfig, apply_features

GRID = (2, 3, 4)
# The tracer's own doings, on tensors that are no leaves and on autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def gradients(per_token: bool, plan: CompilePlan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    _, ours = model_pair()
    apply_features(nn.ModuleDict({"predictor": ours}), FeaturesConfig(compile_plan=plan))
    output = ours(*model_inputs(2, grid=GRID, per_token=per_token, full_text=True))
    output.square().sum().backward()
    return output.detach(), {name: p.grad for name, p in ours.named_parameters()}


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])],
    ids=["traced", "inductor"],
)
@pytest.mark.parametrize("per_token", [False, True])
def test_compiled_blocks_equal_eager_ones(per_token: bool, backend: str) -> None:
    expected, expected_grads = gradients(per_token, CompilePlan())
    torch.compiler.reset()
    counters.clear()
    output, grads = gradients(per_token, CompilePlan(apply_modules=("predictor.blocks.{*}",), backend=backend))
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert_near(output, expected, FP32_BLOCK)
    assert_gradients_near(grads, expected_grads, FP32_GRADIENT)
