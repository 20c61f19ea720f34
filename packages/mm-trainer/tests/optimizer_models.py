"""What the tests of optimizers train: parameters without a forward, and a small model for whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from trainer_plugin_models import VOCABULARY, Regressor

from mm_trainer.config import TrainingConfig
from mm_trainer.optim.optimizers import NamedOptimizer, build_optimizers
from mm_trainer.registry import register_model

KINDS = ("adamw", "adamw_8bit", "adamw_sr", "muon")


@register_model("wide_regressor")
class WideRegressor(Regressor):
    """Wide enough for 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        width = 256
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, ids: Tensor, target: Tensor, sample_key: Tensor, **other: Tensor) -> Any:
        return super().forward(ids, target.to(self.head.weight.dtype), sample_key, **other)


class Net(nn.Module):
    """Matrices of blocks, wide and tall, whose rows no number of ranks divides; some ranks of three get none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 256)
        self.blocks = nn.ModuleList([nn.Linear(256, 23), nn.Linear(2048, 4), nn.Linear(24, 65, bias=False)])
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        self.to(dtype)


def training(kind: str, **options: Any) -> TrainingConfig:
    return TrainingConfig(train_iters=5, optimizer=kind, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def build(kind: str, **options: Any) -> tuple[Net, NamedOptimizer]:
    """A net in the dtype that the optimizer is for, whole on this process."""
    net = Net(torch.bfloat16 if kind == "adamw_sr" else torch.float32)
    return net, build_optimizers({"net": net}, training(kind, **options))["net"]


def set_gradients(net: nn.Module, step: int, *, bad: bool = False) -> None:
    """Gradients that depend on the step alone; on ranks, each gets its part."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in net.parameters():
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        whole[0] = 0 if parameter.ndim > 1 else whole[0]
        if bad:
            whole.fill_(float("nan"))
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = whole


def run(net: nn.Module, optimizer: NamedOptimizer, steps: range, *, bad: frozenset[int] = frozenset()) -> None:
    for step in steps:
        set_gradients(net, step, bad=step in bad)
        optimizer.step(1e-2 / (step + 1), torch.tensor(float(step in bad)))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def snapshot(net: nn.Module, optimizer: NamedOptimizer) -> dict[str, Tensor]:
    """Whole weights and state."""
    weights = {name: whole(parameter.detach()) for name, parameter in net.named_parameters()}
    return weights | {name: whole(tensor) for name, tensor in optimizer.state().items()}


@contextmanager
def eager() -> Iterator[None]:
    """torchao's optimizers compile their step; as a reference they needn't."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")
