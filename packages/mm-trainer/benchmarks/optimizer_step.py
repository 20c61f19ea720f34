"""What an optimizer costs: bytes of weights and state per parameter, and the time of a step.

    python packages/mm-trainer/benchmarks/optimizer_step.py --dim 1024 --layers 2

Blocks of the shapes of a diffusion transformer (eight matrices of dim × dim, two of dim × 4 dim), on the accelerator if
there is one, on one process. The optimizers take turns, so that they meet the same machine; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from mm_parallel import accelerator
from mm_trainer.config import TrainingConfig
from mm_trainer.metrics.profiling import held_bytes
from mm_trainer.optim.optimizers import NamedOptimizer, build_optimizers

CASES = (
    ("adamw", torch.float32),
    ("adamw_8bit", torch.float32),
    ("adamw_8bit", torch.bfloat16),
    ("adamw_sr", torch.bfloat16),
    ("muon", torch.float32),
)


class Blocks(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        shapes = [(dim, dim)] * 8 + [(dim, 4 * dim), (4 * dim, dim)]
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*shape) for shape in shapes) for _ in range(layers))


def step_seconds(model: nn.Module, optimizer: NamedOptimizer, device: torch.device) -> float:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    start = _now(device)
    optimizer.step(1e-4, torch.zeros((), device=device))
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = accelerator() or torch.device("cpu")
    built = {}
    for kind, dtype in CASES:
        model = Blocks(arguments.dim, arguments.layers).to(device, dtype)
        built[kind, dtype] = model, build_optimizers({"": model}, TrainingConfig(train_iters=1, optimizer=kind))[""]
    times: dict[tuple[str, torch.dtype], list[float]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds + 1):
        for case, (model, optimizer) in built.items():
            times[case].append(step_seconds(model, optimizer, device))
    for (kind, dtype), (model, optimizer) in built.items():
        held = held_bytes({"": model}, {"": optimizer})["model"]
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{kind:10s} {str(dtype).removeprefix('torch.'):8s} weights {held['parameters'] / count:.2f} + state "
            f"{held['optimizer'] / count:.2f} bytes per parameter; {count / 1e6:.0f} M parameters in "
            f"{1000 * statistics.median(times[kind, dtype][1:]):.0f} ms on {device.type}"
        )


if __name__ == "__main__":
    main()
