"""A compiled block is one graph and computes the same."""

from __future__ import annotations

import pytest
import torch
from wan_helpers import model_inputs, model_pair

GRID = (2, 3, 4)
# The tracer's own doings, on tensors that are no leaves and on autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def gradients(per_token: bool, backend: str | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    _, ours = model_pair()
    if backend is not None:
        for block in ours.blocks:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    output = ours(*model_inputs(2, grid=GRID, per_token=per_token, full_text=True))
    output.square().sum().backward()
    return output.detach(), {name: p.grad for name, p in ours.named_parameters()}


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
@pytest.mark.parametrize("per_token", [False, True])
def test_compiled_blocks_equal_eager_ones(per_token: bool, backend: str) -> None:
    torch.compiler.reset()
    output, grads = gradients(per_token, backend)
    expected, expected_grads = gradients(per_token, None)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6, name
