"""Commands that run on ranks: checked first, then run in this process or in ranks that are started for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_trainer.errors import ConfigError, InputError
from mm_trainer.launch.failures import record_failure
from mm_trainer.launch.launcher import launch
from mm_trainer.launch.plan import BAD_INPUT, FAULT, LaunchPlan
from mm_trainer.launch.rank import RankEnvironment

if TYPE_CHECKING:
    from types import TracebackType

    from mm_trainer.config import TrainerConfig


@dataclass(frozen=True)
class Job:
    """One command on one configuration.

    Args:
        command: its name on the command line.
        target: ``module:function`` that every rank calls with the loaded configuration; returns an exit code.
        config: file or ``recipe:NAME``.
        overrides: ``key=value``.
        options: keyword arguments of the function.
        flags: the same, as written on the command line.
        prepare: called with the configuration before it is checked.
    """

    command: str
    target: str
    config: str
    overrides: Sequence[str]
    options: Mapping[str, Any]
    flags: Sequence[str] = ()
    prepare: Callable[[TrainerConfig], None] | None = None


@dataclass(frozen=True)
class Ranks:
    """Where a job runs, as the command line says it; see `LaunchPlan`."""

    nproc_per_node: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0


def run_job(job: Job, ranks: Ranks) -> int:
    """Run ``job``; under torchrun or our own launcher, as the rank that this process is.

    Returns:
        the exit code.

    Raises:
        InputError: the configuration can't start; no rank has been started, no process group initialised.
    """
    rank = RankEnvironment.read()
    if rank is not None:
        if not rank.supervised:  # our own launcher has checked
            _check_first(job, rank.world_size)
        return _run_here(job)
    if ranks.nproc_per_node is None and ranks.nnodes == 1:
        _check_first(job, 1)
        return _run_here(job)
    if ranks.nnodes > 1 and ranks.rdzv_endpoint is None:
        raise InputError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the place where the nodes meet")
    per_node = ranks.nproc_per_node or 1
    grace_time_s = _check_first(job, per_node * ranks.nnodes)
    plan = LaunchPlan(
        per_node, ranks.nnodes, ranks.rdzv_endpoint, ranks.rdzv_id, ranks.max_restarts, grace_time_s=grace_time_s
    )
    return launch(plan, ["-m", "mm_trainer", job.command, job.config, *job.overrides, *job.flags])


def _check_first(job: Job, world_size: int) -> float:
    """Refuse a configuration that can't start; returns its grace time in seconds."""
    from mm_trainer.commands.check import check
    from mm_trainer.config import load_config

    loaded = load_config(job.config, job.overrides)
    if job.prepare is not None:
        job.prepare(loaded)
    return check(loaded, world_size, require_files=True).config.training.grace_time_s


def _run_here(job: Job) -> int:
    from mm_trainer.config import load_config, locate

    loaded = load_config(job.config, job.overrides)  # before torch, so that a wrong key is answered at once
    module, _, function = job.target.partition(":")
    target: Callable[..., int] = getattr(importlib.import_module(module), function)
    try:
        return target(loaded, **job.options)
    except ConfigError as error:  # raised by a model or an optimizer, which know the key only
        raise locate(loaded, error) from error


def end_with(error: BaseException) -> None:
    """Report ``error`` once for all ranks and leave with its exit code; a fault of ours is raised on."""
    from mm_checkpoint.errors import BadInputError

    rank = RankEnvironment.read()
    error.__traceback__ = _below_typer(error.__traceback__)
    bad_input = isinstance(error, InputError | BadInputError)
    code = BAD_INPUT if bad_input else FAULT
    if rank is not None:
        record_failure(rank, error, code)
        if rank.supervised:  # the launcher prints the first error of all
            sys.exit(code)
    if not bad_input:
        raise error
    if rank is None or rank.rank == 0:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _below_typer(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the two dozen frames of the command-line library."""
    start, frame = trace, trace
    while frame is not None:
        if frame.tb_frame.f_globals["__name__"].startswith("typer"):
            start = frame.tb_next
        frame = frame.tb_next
    return start
