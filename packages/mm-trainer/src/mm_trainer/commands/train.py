"""One training run as every rank executes it, from a loaded configuration to the last checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from mm_checkpoint import CheckpointManager
from mm_parallel import ParallelMesh, accelerator
from mm_trainer.commands.env import environment_report
from mm_trainer.commands.prepare import Prepared
from mm_trainer.commands.unread import check_conditions
from mm_trainer.config import ResolvedConfig, TrainingConfig, dump_resolved
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.pipeline import Conditions
from mm_trainer.contracts.step import StepContext
from mm_trainer.data import BatchLoader, build_loader, build_validation
from mm_trainer.data.batch import Batch, to_device
from mm_trainer.data.loaders import ValidationBatches
from mm_trainer.engine.build import BuiltModel, build_model
from mm_trainer.engine.checkpoint import CheckpointIO, Progress
from mm_trainer.engine.conditions import ConditionBatcher
from mm_trainer.engine.loop import Services, TrainEngine
from mm_trainer.engine.signals import RequestWatcher
from mm_trainer.engine.stepping import Stepping
from mm_trainer.launch.process import pick_device, process_group, set_up_logging
from mm_trainer.launch.rank import RankEnvironment
from mm_trainer.metrics.profiling import ProfileWindows
from mm_trainer.metrics.sinks import open_sinks
from mm_trainer.metrics.timing import PhaseTimer
from mm_trainer.metrics.window import memory_figures
from mm_trainer.metrics.writer import MetricsWriter
from mm_trainer.optim.ema import WeightAverage
from mm_trainer.optim.lr import LearningRate
from mm_trainer.optim.optimizers import NamedOptimizer, build_optimizers
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)


def train(prepared: Prepared, *, dry_run: bool = False) -> int:
    """Run the training that was prepared; called once in every rank's process.

    Args:
        dry_run: one step, nothing saved; reports the memory peak.

    Returns:
        the exit code, 0. Whatever goes wrong raises: `InputError` for the user's input, anything else for a fault.
    """
    environment = RankEnvironment.read()
    rank = environment or RankEnvironment()
    set_up_logging(rank.rank)
    config, device_type = prepared.config, pick_device(rank.local_rank)
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    with process_group(environment, device_type, timeout_s=config.parallel.timeout_s):
        run_training(prepared, ParallelMesh.build(config.mesh, device_type=device_type), dry_run=dry_run)
        if dry_run:
            log.info("one step done, nothing saved; %s", describe_memory_peak())
    return 0


def run_training(prepared: Prepared, mesh: ParallelMesh, *, dry_run: bool = False) -> TrainEngine:
    """Build, load or resume, and train on the ranks of ``mesh``; the process group is initialised."""
    engine = make_engine(prepared, mesh, dry_run=dry_run)
    with engine.services.metrics:
        engine.train()
    return engine


def make_engine(prepared: Prepared, mesh: ParallelMesh, *, dry_run: bool = False) -> TrainEngine:
    """Everything up to the first step; called on all ranks."""
    config, training = prepared.config, prepared.config.training
    origin = _Origin.of(training)
    built = _build(prepared, mesh, origin)
    timer = PhaseTimer(mesh.device)
    context = StepContext(timer.phase, cross_submodel_prefetch=config.parallel.fsdp_plan.cross_submodel_prefetch)
    if isinstance(built.model, ModelContainer):
        built.model.set_step_context(context)
    optimizers, ema = build_optimizers(built.trainable, training), _make_ema(built, training)
    resolved_text = dump_resolved(prepared.bound.config)  # with the plugins' own keys settled too
    checkpoints = CheckpointIO(origin.manager, built, optimizers, resolved_config=resolved_text, ema=ema)
    loader = build_loader(config, prepared.bound, mesh, built.model.input_spec())
    progress = _restore(origin, checkpoints, loader, ema, with_optimizer=not training.no_load_optim)
    learning_rate = make_learning_rate(training, steps_per_epoch=loader.steps_per_epoch)
    if mesh.rank == 0:
        print_summary(built)
    if not dry_run:
        checkpoints.prepare(progress, loader.state_dict(step=progress.step))
        if mesh.rank == 0:
            _describe_run(Path(training.save), resolved_text)
    services = Services(
        # Condition batching takes batches ahead of their use, so the position follows from the step.
        data_state=lambda: loader.state_dict(step=progress.step),
        checkpoints=None if dry_run else checkpoints,
        metrics=_metrics(config, mesh, progress, learning_rate, dry_run=dry_run),
        requests=RequestWatcher(None if dry_run else Path(training.save)),
        profiles=_make_profiles(config, mesh, built, optimizers),
        validation=_validation(prepared, built, mesh, dry_run=dry_run),
        describe_sample=loader.describe,
        stepping=Stepping(built.model.alternation if isinstance(built.model, ModelContainer) else None),
        timer=timer,
        ema=ema,
    )
    return TrainEngine(
        built.model,
        frozen=built.frozen,
        optimizers=optimizers,
        mesh=mesh,
        config=training,
        learning_rate=learning_rate,
        batches=_batches(loader, built, prepared, mesh, context),
        services=services,
        progress=progress,
        last_step=progress.step + 1 if dry_run else learning_rate.total_steps,
        reduce_every_micro_step=config.parallel.fsdp_plan.reduce_every_micro_step,
    )


# --- where the run begins -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """Where the run's weights come from, if they come from an earlier run.

    Args:
        manager: of this run's checkpoints.
        resume_from: iteration to go on from.
        warm_start: iteration whose weights the run starts with, if it doesn't go on from one.
    """

    manager: CheckpointManager
    resume_from: Path | None
    warm_start: Path | None

    @classmethod
    def of(cls, training: TrainingConfig) -> _Origin:
        manager = CheckpointManager(
            Path(training.save),
            keep_last=training.keep_last,
            keep_every=training.keep_every,
            async_save=training.save_async,
        )
        resume_from = manager.resolve(training.load) if training.load is not None else None
        warm_start = None
        if resume_from is None and training.init_from is not None:
            warm_start = manager.resolve(training.init_from)
        return cls(manager, resume_from, warm_start)

    @property
    def has_weights(self) -> bool:
        """Whether the trained sub-models are filled by a checkpoint."""
        return self.resume_from is not None or self.warm_start is not None


def _build(prepared: Prepared, mesh: ParallelMesh, origin: _Origin) -> BuiltModel:
    config = prepared.config
    return build_model(
        prepared.bound,
        mesh,
        structure=prepared.structure,
        plan=config.parallel.fsdp_plan,
        features=config.features,
        seed=config.training.seed,
        attention_kernel=config.parallel.attention_kernel,
        resuming=origin.has_weights,
        unused=prepared.bound.frozen if config.data.cache is not None else (),
    )


def _restore(
    origin: _Origin, checkpoints: CheckpointIO, loader: BatchLoader, ema: WeightAverage | None, *, with_optimizer: bool
) -> Progress:
    """Fill weights, optimizer and data position from an earlier run, if there is one; returns where it stood."""
    if origin.resume_from is not None:
        state = checkpoints.load(origin.resume_from, with_optimizer=with_optimizer)
        loader.load_state_dict(state["data"])
        progress = Progress(state["step"], state["samples"])
        _report_resume(origin.resume_from, progress, checkpoints, with_optimizer=with_optimizer)
        return progress
    if origin.warm_start is not None:
        checkpoints.load_weights(origin.warm_start)
        if ema is not None:
            ema.restart()
        log.info("warm start: weights from %s; step 0, fresh optimizer", origin.warm_start)
    return Progress()


def make_learning_rate(training: TrainingConfig, *, steps_per_epoch: int) -> LearningRate:
    """The schedule; a length in epochs becomes one in steps."""
    total = training.train_iters or (training.train_epochs or 0) * steps_per_epoch
    warmup = training.lr_warmup_iters
    return LearningRate(
        peak=training.lr,
        floor=training.lr_min,
        style=training.lr_decay_style,
        warmup_steps=math.ceil(training.lr_warmup_ratio * total) if warmup is None else warmup,
        total_steps=total,
    )


def _report_resume(path: Path, progress: Progress, checkpoints: CheckpointIO, *, with_optimizer: bool) -> None:
    what = (
        "weights, optimizer, data position" if with_optimizer else "weights and data position, with a fresh optimizer"
    )
    log.info("resumed %s from %s: step %d, %d samples seen", what, path, progress.step, progress.samples)
    log.info("learning rate and weight decay follow from the configuration, not from the checkpoint")
    for difference in checkpoints.differences(path):
        log.info(
            "  differs: %s was %s, is %s (effect: %s)",
            difference.key,
            difference.before,
            difference.now,
            difference.effect,
        )


# --- what surrounds the loop ------------------------------------------------------------------------------------------


def _describe_run(folder: Path, resolved_text: str) -> None:
    """The resolved configuration and the environment, next to the checkpoints; on one rank."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.resolved.yaml").write_text(resolved_text, encoding="utf-8")
    (folder / "logs" / "environment.yaml").write_text(yaml.safe_dump(environment_report()), encoding="utf-8")


def _metrics(
    config: ResolvedConfig, mesh: ParallelMesh, progress: Progress, learning_rate: LearningRate, *, dry_run: bool
) -> MetricsWriter:
    writes = mesh.rank == 0 and not dry_run
    return MetricsWriter(
        open_sinks(Path(config.training.save), config.tools.logging) if writes else [],
        total_steps=learning_rate.total_steps,
        first_step=progress.step,
        enabled=mesh.rank == 0,
    )


def _validation(
    prepared: Prepared, built: BuiltModel, mesh: ParallelMesh, *, dry_run: bool
) -> ValidationBatches | None:
    if dry_run or not prepared.config.training.val_interval:
        return None
    return build_validation(prepared.config, prepared.bound, mesh, built.model.input_spec())


def _make_ema(built: BuiltModel, training: TrainingConfig) -> WeightAverage | None:
    decay = training.ema.rate
    if decay is None:
        return None
    parameters = {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, model in built.trainable.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return WeightAverage(parameters, decay=decay)


def _make_profiles(
    config: ResolvedConfig, mesh: ParallelMesh, built: BuiltModel, optimizers: dict[str, NamedOptimizer]
) -> ProfileWindows:
    return ProfileWindows(
        config.tools.profile,
        config.tools.memory_profile,
        folder=Path(config.training.save),
        rank=mesh.rank,
        sub_models=built.sub_models,
        optimizers=optimizers,
    )


def _batches(
    loader: BatchLoader, built: BuiltModel, prepared: Prepared, mesh: ParallelMesh, context: StepContext
) -> Iterator[Batch]:
    config, training = prepared.config, prepared.config.training
    if config.data.cache is not None and training.condition_mbs > 1:
        log.info("training.condition_mbs is not used: the conditions come from data.cache")
    if training.condition_mbs == 1 or config.data.cache is not None:
        return iter(loader)
    check_conditions(config, prepared.bound)
    assert isinstance(built.model, ModelContainer)
    pipeline = built.model.pipeline
    assert pipeline is not None

    def prepare(batch: Batch) -> Conditions:
        seed_generators(training.seed, "conditions", int(batch["sample_key"][0]), mesh.device)
        with context.phase("conditions"):
            return pipeline.prepare_conditions(built.sub_models, context, to_device(batch, mesh.device))

    group = mesh.context_parallel().group
    return iter(ConditionBatcher(loader, prepare, every=training.condition_mbs, context_group=group))


# --- the process --------------------------------------------------------------------------------------------------


def describe_memory_peak() -> str:
    """This rank's largest use of memory so far, in words."""
    where = "device" if accelerator() is not None else "host"
    return f"{where} memory peak {memory_figures()['memory_peak_gib']:.2f} GiB"


def print_summary(built: BuiltModel) -> None:
    """What was built, where its weights came from, and how it is sharded."""
    table = Table("sub-model", "model", "parameters", "trainable", "dtype")
    for name, model in built.sub_models.items():
        parameters = list(model.parameters())
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
        table.add_row(
            name or "model",
            built.specs[name].model_id,
            f"{sum(p.numel() for p in parameters):,}",
            f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
            ", ".join(dtypes),
        )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(table)
    for name, source in built.sources.items():
        console.print(f"{name or 'model'} weights: {source}", markup=False)
    if built.parallel_report is not None:
        console.print(str(built.parallel_report), markup=False)
    if isinstance(built.model, ModelContainer) and built.model.pipeline is not None:
        console.print(f"pipeline: {built.model.pipeline.describe()}", markup=False)
