"""How near two computations of one quantity come, whatever the processor.

Another processor, kernel or number of ranks rounds in other places and adds in another order. So a result is compared
with one computed by other means, relative to the **largest** magnitude of that reference: an element near zero is
mostly a difference of large terms, and carries their rounding. The bounds follow from u, half the distance between 1
and the next number of the dtype (2⁻²⁴ ≈ 6e-8 in fp32, 2⁻⁹ ≈ 2e-3 in bf16), and from how many roundings there are.

A test that needs this module carries the mark `numeric`: `hatch run test-numeric` runs it with other kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FP32_OP = 2e-6
"""One operation: a sum of n ≤ 1000 products in whatever order errs by about √n · u = 2e-6 of its scale."""
FP32_BLOCK = 1e-5
"""A tiny network, forward or forward and backward: some 25 operations in a row, independent errors: √25 · 2e-6."""
FP32_GRADIENT = 1e-4
"""Gradients of a whole transformer: what is left of sums that norms and softmax cancel to about a tenth: 10 · 1e-5."""
FP32_TRACE = 1e-4
"""Losses of up to 20 optimizer steps: each step adds its 1e-5 to the error of the weights: √20 · 1e-5, doubled."""
BF16_BLOCK = 2e-2
"""A tiny network in bf16: some 50 operands and results rounded to it in a row, √50 · 2⁻⁹ = 1.4e-2, and a margin."""
BF16_GRADIENT = 3e-2
"""Forward and backward in bf16: √2 times as many roundings."""


def relative_error(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """The largest difference, relative to the largest magnitude of ``expected``, or to ``scale`` if that is larger."""
    assert found.shape == expected.shape, f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    difference = (found.double() - expected.double()).abs().max().item()
    largest = max(expected.double().abs().max().item(), scale)
    return difference / largest if largest > 0 else difference


def assert_near(found: Tensor, expected: Tensor, bound: float, what: object = "", scale: float = 0.0) -> None:
    """`relative_error` is at most ``bound``; NaN fails."""
    error = relative_error(found, expected, scale)
    assert error <= bound, f"{what}: {error:.2g} of the largest magnitude apart, at most {bound:.2g} expected"


def assert_gradients_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = FP32_BLOCK, what: object = ""
) -> None:
    """Gradients of one model, by name, each relative to its `gradient_scales`."""
    assert found.keys() == expected.keys()
    for name, scale in gradient_scales(expected).items():
        assert_near(found[name], expected[name], bound, (what, name), scale)


def gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """What the errors of a model's gradients are relative to: the largest element of each. A gradient far below its
    siblings is a small difference of large sums (softmax cancels what all keys share): at least a hundredth of the
    largest of all."""
    largest = {name: gradient.abs().max().item() for name, gradient in gradients.items()}
    return {name: max(value, max(largest.values()) / 100) for name, value in largest.items()}


def assert_adamw_near(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    gradients: Sequence[Mapping[str, Tensor]],
    lr: float,
    what: object = "",
) -> None:
    """Weights after AdamW's first steps from equal weights, element by element (betas 0.9 and 0.999).

    A step moves an element by lr · m/√v, which is ± lr for a steady gradient however small it is: where rounding
    decides the sign, two computations are up to 2 · lr apart. Elsewhere an error of δ in the gradients moves m/√v by
    at most 2δ/√v, once through m and once through v. Each computation rounds the weight twice a step.

    Args:
        gradients: what the optimizer was given in each of the steps, by name.
    """
    assert found.keys() == expected.keys()
    scales = [gradient_scales(step) for step in gradients]
    for name, weight in expected.items():
        allowed = torch.full_like(weight, len(gradients) * 4 * 2**-24 * weight.abs().max().item())
        squares, forgotten = torch.zeros_like(weight), 1.0
        for step, scale in zip(gradients, scales, strict=True):
            squares = 0.999 * squares + 0.001 * step[name].square()
            forgotten *= 0.999
            root = (squares / (1 - forgotten)).sqrt()
            allowed += lr * (2 * FP32_BLOCK * scale[name] / root).clamp(max=2)
        excess = ((found[name] - weight).abs() / allowed).max().item()
        assert excess <= 1, f"{what}, {name}: {excess:.2g} times as far apart as rounding explains"
