"""Recompute runs a forward twice; its buffers advance once, and gradients are those without recompute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_parallel import FeaturesConfig, RecomputePlan, apply_features
from mm_parallel.activations.buffer_replay import MOST_ELEMENTS


class Counting(nn.Module):
    """Multiplies by how often it ran: in place, by another tensor in its place, and in a batch norm."""

    def __init__(self, *, rebinds: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.rebinds = nn.Linear(4, 4), nn.BatchNorm1d(4), rebinds
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rebinds:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return self.norm(self.layer(x).tanh()) * self.seen


class Model(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting(**options) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(policy: str | None, *, rebinds: bool) -> dict[str, torch.Tensor]:
    """State and gradients after three steps."""
    torch.manual_seed(0)
    model = Model(rebinds=rebinds)
    if policy is not None:
        plan = RecomputePlan(apply_modules=("blocks.{*}",), policy=policy)
        apply_features(model, FeaturesConfig(recompute_plan=plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4, requires_grad=True)).square().mean().backward()
        optimizer.step()
    return {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("rebinds", [False, True])
@pytest.mark.parametrize("policy", ["full", "ops", "every_n"])
def test_buffers_and_gradients_are_those_without_recompute(policy: str, rebinds: bool) -> None:
    expected, found = train(None, rebinds=rebinds), train(policy, rebinds=rebinds)
    assert expected["blocks.0.seen"] == 4
    assert expected["blocks.1.norm.num_batches_tracked"] == 3
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_two_forwards_before_their_backwards() -> None:
    """Each second run sees the buffers of its own first run."""

    def losses(recompute: bool) -> tuple[torch.Tensor, float]:
        torch.manual_seed(1)
        model = Model(rebinds=True)
        if recompute:
            apply_features(model, FeaturesConfig(recompute_plan=RecomputePlan(apply_modules=("blocks.{*}",))))
        first, second = model(torch.randn(5, 4)), model(torch.randn(5, 4))
        (first.mean() + second.square().mean()).backward()
        return model.blocks[0].layer.weight.grad, float(model.blocks[0].seen)

    (expected, count), (found, recounted) = losses(False), losses(True)
    assert torch.equal(found, expected)
    assert recounted == count == 3


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(MOST_ELEMENTS + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table[0] += 1
        return self.layer(x)


def test_a_large_buffer_that_changes_is_refused_by_name() -> None:
    model = nn.Sequential(Table())
    apply_features(model, FeaturesConfig(recompute_plan=RecomputePlan(apply_modules=("0",))))
    with pytest.raises(RuntimeError, match=r"Table changes its buffer table \(65,537 elements\) in its forward"):
        model(torch.ones(1, 2, requires_grad=True))
