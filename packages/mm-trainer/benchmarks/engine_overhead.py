"""What the engine costs around a step: engine over bare loop, and asynchronous checkpoints over none.

    torchrun --standalone --nproc-per-node 2 packages/mm-trainer/benchmarks/engine_overhead.py

A transformer of 36 M parameters (dim 512, 8 layers, 8 heads, feed-forward 2048), 1,024 tokens, float32, FSDP2 by
blocks, all loops over the same model and batches in one process group. First single steps in pairs: the bare forward,
backward, clip and optimizer step, and the engine with logging on; then pairs of ten steps: the engine without saving,
and saving once, in the background. Who goes first turns from pair to pair, so every ratio compares neighbours in time.
Printed are medians, of wall time and of this process's CPU time (all threads), which other load on the machine
disturbs less. With ranks that wait for each other, CPU time leaves out what the waiting costs: look at both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mm_checkpoint import CheckpointManager
from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, clip_grad_norm, parallelize
from mm_trainer.config.sections.training import LoggingConfig, MemoryProfileConfig, ProfileConfig, TrainingConfig
from mm_trainer.contracts import BaseModel, InputSpec, ModelOutput, ModelSpec
from mm_trainer.engine.build import BuiltModel
from mm_trainer.engine.checkpoint import CheckpointIO, Progress
from mm_trainer.engine.loop import Services, TrainEngine
from mm_trainer.engine.signals import RequestWatcher
from mm_trainer.metrics.profiling import ProfileWindows
from mm_trainer.metrics.sinks import open_sinks
from mm_trainer.metrics.writer import MetricsWriter
from mm_trainer.optim.lr import LearningRate
from mm_trainer.optim.optimizers import build_optimizers

DIM, LAYERS, HEADS, FFN, TOKENS = 512, 8, 8, 2048, 1024
SAVE_INTERVAL = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        # As many parameters as cross-attention has, without a second sequence.
        self.gates, self.mix = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.ffn = nn.Sequential(nn.Linear(DIM, FFN), nn.GELU(), nn.Linear(FFN, DIM))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(F.layer_norm(x, (d,))).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d))
        a, scale, shift, g = self.gates(F.layer_norm(x, (d,))).chunk(4, -1)
        x = x + self.mix((a + scale * shift) * g.sigmoid())
        return x + self.ffn(F.layer_norm(x, (d,)))


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, DIM)

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Model:
        return cls()

    def input_spec(self) -> InputSpec:
        return InputSpec()

    def forward(self, x: Tensor, sample_key: Tensor) -> ModelOutput:
        y = x
        for block in self.blocks:
            y = block(y)
        return ModelOutput((self.head(y) - x).square().mean())


class Enough(Exception):
    """Ends a loop between two steps: at its last step the engine would save."""


def batches(count: int) -> Iterator[dict[str, Any]]:
    x = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(count):
        yield {"x": x, "sample_key": torch.tensor([0])}
    raise Enough


def make_engine(model: Model, mesh: ParallelMesh, folder: Path, *, save_interval: int) -> TrainEngine:
    training = TrainingConfig(train_iters=10**6, lr=1e-5, save=folder, save_interval=save_interval, keep_last=1)
    built = BuiltModel(model, {"": model}, ("",), {"": ModelSpec("model", "bench", source=_no_source(), weights=None)})
    optimizers = build_optimizers(built.trainable, training)
    manager = CheckpointManager(folder, keep_last=1, async_save=True)
    main_rank = mesh.rank == 0
    return TrainEngine(
        built.model,
        optimizers=optimizers,
        mesh=mesh,
        config=training,
        learning_rate=LearningRate(1e-5, 0.0, "constant", 0, 10**6),
        batches=batches(0),
        services=Services(
            data_state=dict,
            checkpoints=CheckpointIO(manager, built, optimizers, resolved_config="") if save_interval else None,
            metrics=MetricsWriter(open_sinks(folder, LoggingConfig()) if main_rank else [], enabled=main_rank),
            requests=RequestWatcher(folder),
            profiles=ProfileWindows(
                ProfileConfig(), MemoryProfileConfig(), folder=folder, rank=mesh.rank, sub_models={}, optimizers={}
            ),
        ),
        progress=Progress(),
    )


def _no_source() -> Any:
    from mm_checkpoint import WeightSourceConfig

    return WeightSourceConfig()


def run_bare(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in islice(batches(steps), steps):
        model(**batch).loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_engine(engine: TrainEngine, steps: int) -> None:
    engine.batches = batches(steps)
    with suppress(Enough):
        engine.run_steps()


def timed(work: Callable[[], None], steps: int) -> tuple[float, float]:
    """Wall and CPU seconds per step of rank 0."""
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    return (time.perf_counter() - started) / steps, (time.process_time() - busy) / steps


def compare(loops: Mapping[str, Callable[[], None]], *, pairs: int, steps: int, aim: float) -> None:
    """Print what a step of either loop takes, and the ratio of the second to the first."""
    names = list(loops)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for work in loops.values():
        work()  # the first steps build states
    for number in range(pairs):
        for name in names[:: 1 - 2 * (number % 2)]:
            taken[name].append(timed(loops[name], steps))
    if dist.get_rank() > 0:
        return
    print(f"  {pairs} pairs of {steps} steps{'':20}{'wall':>9}{'CPU':>9}")
    for name in names:
        wall, busy = (statistics.median(part[i] for part in taken[name]) for i in (0, 1))
        print(f"  {name:36}{wall:9.3f}{busy:9.3f}  s/step")
    first, second = (taken[name] for name in names)
    wall, busy = (statistics.median(b[i] / a[i] for a, b in zip(first, second, strict=True)) for i in (0, 1))
    print(f"  {'the second over the first':36}{wall:9.3f}{busy:9.3f}  aim: {aim}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="of single steps; a sixth as many of ten steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(os.environ.get("BENCH_FOLDER", tempfile.gettempdir())) / "engine_overhead"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    mesh = ParallelMesh.build(MeshSizes(shard=dist.get_world_size()))
    torch.manual_seed(0)
    model = Model()
    plan = FSDPPlan(apply_modules=("blocks.{*}",), param_dtype="fp32", reduce_dtype="fp32")
    parallelize(model, mesh=mesh, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    plain = make_engine(model, mesh, folder / "plain", save_interval=0)
    saving = make_engine(model, mesh, folder / "saving", save_interval=SAVE_INTERVAL)
    saving.progress.step = SAVE_INTERVAL - 1  # ten steps then save after the first, and the other nine hide the writing
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters / 1e6:.1f} M parameters, {TOKENS} tokens, {dist.get_world_size()} ranks", flush=True)
    compare(
        {"bare loop": lambda: run_bare(model, optimizer, 1), "engine": lambda: run_engine(plain, 1)},
        pairs=arguments.pairs,
        steps=1,
        aim=1.02,
    )
    compare(
        {
            "engine": lambda: run_engine(plain, SAVE_INTERVAL),
            "engine, saving every 10 steps": lambda: run_engine(saving, SAVE_INTERVAL),
        },
        pairs=max(1, arguments.pairs // 6),
        steps=SAVE_INTERVAL,
        aim=1.05,
    )
    saving.services.checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
