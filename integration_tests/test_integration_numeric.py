"""The tolerances of the other tests, and that what needs them runs with more than one set of kernels."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from numbers_close import FP32_BLOCK, FP32_OP, assert_adamw_near, assert_gradients_near, assert_near

ROOT = Path(__file__).resolve().parents[1]
# Too long for a second run, and their arithmetic is that of shorter tests.
RUN_ONCE = {"test_the_loss_trace_is_the_same_on_any_layout", "test_compiled_blocks_equal_eager_ones"}
TEST_FILES = sorted([*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("integration_tests/test_*.py")])

pytestmark = pytest.mark.numeric


def names_of_bounds(tree: ast.Module) -> set[str]:
    """What a test file imports from `numbers_close`."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "numbers_close"]
    return {alias.name for node in imports for alias in node.names}


def unmarked_tests(tree: ast.Module) -> list[str]:
    """Tests that use a bound or a comparison of `numbers_close` and carry the mark in none of their cases."""
    names = names_of_bounds(tree)
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)]
    if any("pytest.mark.numeric" in ast.unparse(node.value) for node in marks):
        return []
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [
        test.name
        for test in tests
        if test.name not in RUN_ONCE
        and names & {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        and not any("pytest.mark.numeric" in ast.unparse(decorator) for decorator in test.decorator_list)
    ]


def test_whoever_compares_numbers_carries_the_mark() -> None:
    """`hatch run test-numeric` picks its tests by it."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in TEST_FILES}
    assert sum(bool(names_of_bounds(tree)) for tree in trees.values()) > 15
    for path, tree in trees.items():
        assert not unmarked_tests(tree), f"{path.relative_to(ROOT)}: mark these with pytest.mark.numeric"
    bare = "from numbers_close import assert_near\ndef test_it():\n    assert_near(1, 2, 3)\n"
    assert unmarked_tests(ast.parse(bare)) == ["test_it"]


def kernels(rank: int, world_size: int) -> tuple[str, str | None]:
    return torch.backends.cpu.get_cpu_capability(), os.environ.get("MKL_CBWR")


def test_ranks_use_the_kernels_of_the_session(run_ranks) -> None:
    assert run_ranks(kernels, 1) == [kernels(0, 1)]
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        assert kernels(0, 1)[0] == "DEFAULT"


def test_an_error_is_relative_to_the_largest_magnitude() -> None:
    expected = torch.tensor([1000.0, 1e-3])
    assert_near(expected + torch.tensor([0.0, 1e-3]), expected, FP32_OP)
    with pytest.raises(AssertionError, match=r"features: 4e-06 of the largest magnitude apart, at most 2e-06"):
        assert_near(expected + torch.tensor([0.0, 4e-3]), expected, FP32_OP, "features")
    with pytest.raises(AssertionError, match="nan of the largest"):
        assert_near(torch.tensor([float("nan"), 1.0]), expected, FP32_OP)
    with pytest.raises(AssertionError, match=r"shapes \(1,\) and \(2,\)"):
        assert_near(expected[:1], expected, FP32_OP)


def test_small_gradients_are_measured_against_a_hundredth_of_the_largest() -> None:
    expected = {"v": torch.tensor([1.0]), "k": torch.tensor([1e-6])}
    assert_gradients_near({**expected, "k": torch.tensor([1.05e-6])}, expected)
    with pytest.raises(AssertionError, match="'k'.*at most 1e-05"):
        assert_gradients_near({**expected, "k": torch.tensor([1.5e-6])}, expected)


def adamw(gradients: list[torch.Tensor], lr: float) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=lr)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_adamw_moves_by_the_learning_rate_where_a_gradient_is_noise_and_nowhere_else() -> None:
    lr, noise = 1e-3, FP32_BLOCK / 4
    gradients = [torch.tensor([1.0, 0.1, 1e-3, noise]), torch.tensor([-2.0, 0.1, 1e-3, noise])]
    expected = {"w": adamw(gradients, lr)}
    steps = [{"w": gradient} for gradient in gradients]
    for sign in (1.0, -1.0):
        moved = adamw([gradient + sign * 2 * noise for gradient in gradients], lr)
        assert_adamw_near({"w": moved}, expected, steps, lr)
    flipped = adamw([gradient - 2 * noise for gradient in gradients], lr)
    assert (flipped - expected["w"])[3] > lr, "the last element went the other way"
    for element, wrong in enumerate((1e-6, 1e-5, 1e-3)):
        found = expected["w"].clone()
        found[element] += wrong
        with pytest.raises(AssertionError, match="w: .* times as far apart as rounding explains"):
            assert_adamw_near({"w": found}, expected, steps, lr)
