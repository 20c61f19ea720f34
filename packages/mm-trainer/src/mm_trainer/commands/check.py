"""What ``mm-trainer check`` shows of a configuration, and of its data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm_trainer.commands.job import Job, run_job
from mm_trainer.commands.prepare import Prepared
from mm_trainer.errors import DataError, InputError
from mm_trainer.launch.plan import LaunchPlan
from mm_trainer.launch.rank import RankEnvironment

if TYPE_CHECKING:
    from rich.console import Console

    from mm_trainer.config import TrainerConfig

FEW_SAMPLES = 2
"""Samples of the micro-batch that `check_step` runs, at most."""


def scan_data(prepared: Prepared, sheet: Path, console: Console) -> None:
    """Read every sample of the training set once: tables of what is usable, and a picture of what the model will see.

    Args:
        sheet: where the picture goes, a PNG.

    Raises:
        DataError: nothing is usable.
        InputError: ``sheet`` is no name for a PNG.
    """
    if sheet.suffix.lower() != ".png" or sheet.is_dir():
        raise InputError(f"--sheet {sheet}: expected the name of a .png file")
    sheet.parent.mkdir(parents=True, exist_ok=True)
    from rich.progress import Progress

    from mm_trainer.data.open import open_datasets, worker_options
    from mm_trainer.data.survey.contact_sheet import write_contact_sheet
    from mm_trainer.data.survey.scan import scan, scan_tables
    from mm_trainer.engine.build import build_structure

    config = prepared.config
    training = config.training
    structure = prepared.structure or build_structure(prepared.bound, seed=training.seed)  # raises what isn't known
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading samples", total=None)
        result = scan(
            open_datasets(prepared.bound.datasets, prepared.bound, structure.model.input_spec(), seed=training.seed),
            micro_batch_size=training.micro_batch_size,
            data_size=config.mesh.data,
            accumulation=int(training.gradient_accumulation_steps),
            seed=training.seed,
            workers=worker_options(config),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for table in scan_tables(result):
        console.print(table)
    if not result.buckets:
        raise DataError("no sample can be used")
    write_contact_sheet(result.glimpses, sheet, samples=result.report.rows)
    console.print(f"what the model will see: {sheet}", highlight=False, soft_wrap=True, markup=False)


def print_report(prepared: Prepared, console: Console) -> None:
    """What was checked: the ranks, the batch, the sub-models, and the notes."""
    from rich.markup import escape
    from rich.table import Table

    config = prepared.config
    mesh, training = config.mesh, config.training
    console.print(
        f"{config.world_size} ranks = {mesh.replicate} replicas × {mesh.shard} shards; "
        f"{mesh.data} data × {mesh.ring} ring × {mesh.ulysses} ulysses",
        highlight=False,
    )
    console.print(
        f"global batch {training.global_batch_size} = micro batch {training.micro_batch_size} × data {mesh.data} "
        f"× accumulation {training.gradient_accumulation_steps}",
        highlight=False,
    )
    table = Table("sub-model", "parameters", "trainable", "dtype", "source")
    for name, spec in prepared.bound.specs.items():
        counts = ["?", "?"]
        if prepared.structure is not None:
            parameters = list(
                prepared.structure.sub_models[name if name in prepared.structure.sub_models else ""].parameters()
            )
            counts = [
                f"{sum(p.numel() for p in parameters):,}",
                f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
            ]
        source = spec.source.checkpoint_path or spec.source.from_pretrained
        missing = "not here" if name in prepared.bound.without_source else "none (random initialisation)"
        table.add_row(name, *counts, spec.dtype, escape(source or missing))
    console.print(table)
    for note in prepared.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def check_step(config: str, overrides: Sequence[str], world_size: int | None = None) -> int:
    """One tiny step on the CPU, on ranks that are started for it; see `mm_trainer.commands.forward`.

    Args:
        config: file or ``recipe:NAME``.
        overrides: ``key=value``.
        world_size: ranks; None: as few as the sequence is split over.

    Returns:
        the exit code; with one rank, what is wrong raises.
    """
    from mm_trainer.config import load_config

    target, options = "mm_trainer.commands.forward:check_forward", {"forward": True}
    rank = RankEnvironment.read()
    if rank is not None and rank.supervised:  # one of the ranks that were started below
        return run_job(Job("check", target, config, overrides, options), None)
    if rank is not None:
        raise InputError("check --forward starts its ranks itself: run it once, with --world-size")
    loaded = load_config(config, overrides)
    ranks = world_size or loaded.parallel.ulysses_parallel_size * loaded.parallel.ring_attention_size
    with tempfile.TemporaryDirectory(prefix="mm_trainer_check_") as folder:
        job = Job("check", target, config, [*overrides, *tiny_overrides(loaded, Path(folder))], options)
        return run_job(job, LaunchPlan(ranks) if ranks > 1 else None)


def tiny_overrides(config: TrainerConfig, folder: Path) -> list[str]:
    """What of a configuration is set aside for one step on a small machine; nothing is read or written elsewhere."""
    return [
        f"training.save={folder}",
        "training.load=null",
        "training.init_from=null",
        "training.no_load_optim=false",
        f"training.micro_batch_size={min(FEW_SAMPLES, config.training.micro_batch_size)}",
        "training.gradient_accumulation_steps=1",
        "training.global_batch_size=null",
        "training.condition_mbs=1",
        "parallel.data_parallel_size=null",
        "parallel.fully_shard_parallel_size=auto",
        "data.dataloader_param.num_workers=0",
    ]
