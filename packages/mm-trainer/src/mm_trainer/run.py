"""One training run as every rank executes it, from a loaded configuration to the last checkpoint."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mm_checkpoint import CheckpointManager
from mm_parallel import ParallelMesh
from mm_trainer.config import ResolvedConfig, TrainerConfig, bind, dump_resolved, resolve
from mm_trainer.data import build_loader, build_validation
from mm_trainer.engine.conditions import ConditionBatcher
from mm_trainer.engine.engine import Progress, TrainEngine, to_device
from mm_trainer.engine.lr import LearningRate
from mm_trainer.engine.metrics import MetricsWriter
from mm_trainer.engine.optim import build_optimizer
from mm_trainer.engine.state import CheckpointIO
from mm_trainer.environment import RankEnvironment
from mm_trainer.hub import BuiltModel, build_model, summary_rows

log = logging.getLogger(__name__)


def train(config: TrainerConfig) -> int:
    """Run the training that ``config`` describes; called once in every rank's process.

    Returns:
        the exit code, 0. Whatever goes wrong raises: `InputError` for the user's input, anything else for a fault.
    """
    environment = RankEnvironment.read()
    logging.basicConfig(
        level=logging.INFO if environment.rank == 0 else logging.WARNING,
        format="%(message)s" if environment.rank == 0 else f"[rank {environment.rank}] %(message)s",
        stream=sys.stderr,
        force=True,
    )
    resolved = resolve(config, environment.world_size)
    device = pick_device(environment)
    with process_group(environment, device, timeout_s=resolved.parallel.timeout_s):
        run_training(resolved, ParallelMesh.build(resolved.mesh, device_type=device.type), environment)
    return 0


def run_training(config: ResolvedConfig, mesh: ParallelMesh, environment: RankEnvironment) -> None:
    """Build, load or resume, and train on the ranks of ``mesh``; the process group is initialised."""
    training = config.training
    bound = bind(config)
    folder = Path(training.save) if training.save else None
    main_rank = environment.rank == 0
    manager = resume_from = None
    if folder is not None:
        manager = CheckpointManager(
            folder, keep_last=training.keep_last, keep_every=training.keep_every, async_save=training.save_async
        )
        resume_from = manager.resolve(training.load)
    built = build_model(
        bound,
        mesh,
        plan=config.parallel.fsdp_plan,
        features=config.features,
        seed=training.seed,
        resuming=resume_from is not None,
    )
    if main_rank:
        print_summary(built)
    optimizers = {
        name: build_optimizer(model, training, prefix=f"{name}." if name else "")
        for name, model in built.trainable.items()
    }
    loader = build_loader(config, bound, mesh)
    progress = Progress()
    checkpoints = None
    if manager is not None:
        checkpoints = CheckpointIO(manager, built, optimizers, resolved_config=dump_resolved(config))
    if resume_from is not None:
        state = checkpoints.load(resume_from, with_optimizer=not training.no_load_optim)
        progress = Progress(step=state["step"], samples=state["samples"])
        loader.load_state_dict(state["data"])
        log.info("resumed step %d (%d samples) from %s", progress.step, progress.samples, resume_from)
    if main_rank and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.yaml").write_text(dump_resolved(config), encoding="utf-8")
    learning_rate = LearningRate(
        peak=training.lr,
        floor=training.lr_min,
        style=training.lr_decay_style,
        warmup_steps=training.warmup_steps,
        total_steps=training.train_iters,
    )
    batches = iter(loader)
    if training.condition_mbs > 1:
        pipeline = built.model.pipeline
        batches = iter(
            ConditionBatcher(
                batches,
                lambda batch: pipeline.prepare_conditions(built.model, to_device(batch, mesh.device)),
                every=training.condition_mbs,
            )
        )
    with MetricsWriter(
        folder,
        total_steps=training.train_iters,
        first_step=progress.step,
        enabled=main_rank and folder is not None,
        tensorboard=config.tools.logging.tensorboard,
    ) as metrics:
        TrainEngine(
            built,
            optimizers=optimizers,
            mesh=mesh,
            config=training,
            learning_rate=learning_rate,
            batches=batches,
            data_state=loader.state_dict,
            checkpoints=checkpoints,
            metrics=metrics,
            validation=build_validation(config, bound, mesh),
            progress=progress,
        ).train()


def pick_device(environment: RankEnvironment) -> torch.device:
    """This rank's accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, environment.local_rank)
    torch.accelerator.set_device_index(environment.local_rank)
    return device


@contextmanager
def process_group(environment: RankEnvironment, device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """The default process group, with a CPU backend beside the device's (asynchronous saves need one)."""
    backend = dist.get_default_backend_for_device(device.type)
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{backend}"
    with tempfile.TemporaryDirectory() as rendezvous:
        # A single process needs no port: a file does, and can't collide with another job's.
        init_method = "env://" if environment.launched else f"file://{rendezvous}/store"
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # No collective on the way out of an error: peers may be gone. The process's end tears the group down.
        yield
        dist.destroy_process_group()


def print_summary(built: BuiltModel) -> None:
    """The start-up tables: what was built and loaded, and how it is sharded."""
    rows = summary_rows(built)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    console = Console(stderr=True)
    console.print(table)
    if built.parallel_report is not None:
        console.print(str(built.parallel_report), highlight=False)
