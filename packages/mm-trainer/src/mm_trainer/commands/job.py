"""Commands that run on ranks: checked first, then run in this process or in ranks that are started for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mm_trainer.errors import ConfigError, InputError
from mm_trainer.launch.failures import record_failure
from mm_trainer.launch.launcher import launch
from mm_trainer.launch.plan import BAD_INPUT, FAULT, LaunchPlan
from mm_trainer.launch.rank import RankEnvironment

if TYPE_CHECKING:
    from types import TracebackType

    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.config import TrainerConfig


@dataclass(frozen=True)
class Job:
    """One command on one configuration.

    Args:
        command: its name on the command line.
        target: ``module:function`` that every rank calls with the prepared configuration; returns an exit code.
        config: file or ``recipe:NAME``.
        overrides: ``key=value``.
        options: keyword arguments of the function, each a flag of the command.
        on_load: called with the configuration once it is loaded, before anything else.
    """

    command: str
    target: str
    config: str
    overrides: Sequence[str]
    options: Mapping[str, bool | int]
    on_load: Callable[[TrainerConfig], None] | None = None

    @property
    def arguments(self) -> list[str]:
        """The job as ``python`` arguments."""
        flags = []
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                flags.append(flag)
            elif value is not False:
                flags += [flag, str(value)]
        return ["-m", "mm_trainer", self.command, self.config, *self.overrides, *flags]


def run_job(job: Job, plan: LaunchPlan | None) -> int:
    """Run ``job``; under torchrun or our own launcher, as the rank that this process is.

    The configuration is loaded, resolved, bound and built on meta once in a process: here, and what comes of it is
    handed on. A rank of our own launcher, which has done so to check it, builds for the run only.

    Args:
        plan: ranks to start; None where this process is the only one.

    Returns:
        the exit code.

    Raises:
        InputError: the configuration can't start; no rank has been started, no process group initialised.
    """
    from mm_trainer.commands.prepare import prepare
    from mm_trainer.config import load_config

    loaded = load_config(job.config, job.overrides)  # before torch, so that a wrong key is reported at once
    rank = RankEnvironment.read()
    supervised = rank is not None and rank.supervised
    if job.on_load is not None and not supervised:
        job.on_load(loaded)
    if rank is not None:
        return _run_here(job, prepare(loaded, rank.world_size, check=not supervised))
    if plan is None:
        return _run_here(job, prepare(loaded, 1))
    training = prepare(loaded, plan.world_size).config.training
    return launch(replace(plan, grace_time_s=training.grace_time_s), job.arguments)


def _run_here(job: Job, prepared: Prepared) -> int:
    module, _, function = job.target.partition(":")
    target: Callable[..., int] = getattr(importlib.import_module(module), function)
    try:
        return target(prepared, **job.options)
    except ConfigError as error:  # raised by a model or an optimizer, which know the key only
        from mm_trainer.config import locate

        raise locate(prepared.config, error) from error


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
