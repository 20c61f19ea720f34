"""The hand-written backwards: against finite differences, and against torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from numbers_close import BF16_BLOCK, FP32_OP, assert_near
from torch import Tensor
from torch.nn import functional as F

from mm_models_wan.modules import functional as wan

pytestmark = pytest.mark.numeric

B, S, D, H = 2, 5, 12, 2


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def angles(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = rand(1, S, 1, D // H // 2, seed=9).detach()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def ours_modulated(x: Tensor, *vectors: Tensor) -> Tensor:
    return wan.modulated_norm(x, vectors[:2], vectors[2:], 1e-6)


def plain_modulated(x: Tensor, shift: Tensor, shift_time: Tensor, scale: Tensor, scale_time: Tensor) -> Tensor:
    return F.layer_norm(x, (D,), None, None, 1e-6) * (1 + scale + scale_time) + shift + shift_time


def cases(dtype: torch.dtype, n: int) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """name → (ours, the same with torch's operators in fp32, inputs)."""
    x, y = rand(B, S, D, dtype=dtype), rand(B, S, D, seed=1, dtype=dtype)
    vectors = [v for i in (2, 4) for v in (rand(D, seed=i, dtype=dtype), rand(B, n, D, seed=i + 1, dtype=dtype))]
    first = [v if v.dim() == 1 else v[:1].detach().requires_grad_() for v in (x, *vectors)]
    cos, sin = angles(dtype)
    return {
        "modulated_norm": (ours_modulated, plain_modulated, [x, *vectors]),
        "modulated_norm of one sample": (ours_modulated, plain_modulated, first),
        "gated_add": (
            lambda x, y, a, b: wan.gated_add(x, y, (a, b)),
            lambda x, y, a, b: x + y * (a + b),
            [x, y, *vectors[:2]],
        ),
        "rms_norm": (
            lambda x, w: wan.rms_norm(x, w, 1e-6),
            lambda x, w: F.rms_norm(x, (D,), w, 1e-6),
            [x, vectors[0]],
        ),
        "rotate": (
            lambda x: wan.rotate(x.unflatten(2, (H, -1)), cos, sin),
            lambda x: plain_rotate(x.unflatten(2, (H, -1)), cos.float(), sin.float()),
            [x],
        ),
        "gelu_linear": (
            wan.gelu_linear,
            lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
            [x, rand(7, D, seed=6, dtype=dtype), rand(7, seed=7, dtype=dtype)],
        ),
    }


NAMES = list(cases(torch.float64, 1))


@pytest.mark.parametrize("n", [1, S])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_finite_differences(name: str, n: int) -> None:
    ours, _, inputs = cases(torch.float64, n)[name]
    assert torch.autograd.gradcheck(ours, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, S])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_against_torch(name: str, n: int, dtype: torch.dtype) -> None:
    ours, plain, inputs = cases(dtype, n)[name]
    _, _, copies = cases(dtype, n)[name]
    wide = [copy.detach().float().requires_grad_() for copy in copies]
    got, expected = ours(*inputs), plain(*wide)
    bound = FP32_OP if dtype == torch.float32 else BF16_BLOCK
    assert_near(got, expected, bound)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    got.backward(direction.to(got.dtype))
    expected.backward(direction)
    for mine, theirs in zip(inputs, wide, strict=True):
        assert mine.grad.dtype == mine.dtype
        assert_near(mine.grad, theirs.grad, bound)


def test_frozen_inputs_are_fine() -> None:
    ours, _, inputs = cases(torch.float32, 1)["gelu_linear"]
    x, weight, bias = (t.detach() for t in inputs)
    ours(x.requires_grad_(), weight, bias).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def saved_bytes(function: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Bytes that a call keeps beyond its inputs."""
    known = {t.untyped_storage().data_ptr() for t in inputs}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)


@pytest.mark.parametrize("name", NAMES)
def test_only_statistics_are_kept_beside_the_inputs(name: str) -> None:
    ours, _, inputs = cases(torch.float32, S)[name]
    tables = sum(t.numel() * 4 for t in angles(torch.float32)) if name == "rotate" else 0
    assert saved_bytes(ours, inputs) <= 2 * B * S * 4 + tables
