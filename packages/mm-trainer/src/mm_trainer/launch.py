"""Start the ranks of one node, and say once what went wrong.

torch's elastic agent starts a process per rank, starts them again if asked to, and ends all when one fails. Here and in
`mm_trainer.elastic` it learns to pass SIGTERM on and wait for the ranks' checkpoint, to print the first error with its
rank, and to return that rank's exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_trainer.config.environment import SUPERVISED, RankEnvironment

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAULT, BAD_INPUT = 1, 2
"""Exit codes of a run that failed."""


@dataclass(frozen=True)
class LaunchPlan:
    """How many ranks, where.

    Args:
        nproc_per_node: ranks on this node.
        nnodes: nodes; each runs this launcher.
        rdzv_endpoint: ``host:port`` where the nodes meet, served by the node that ``host`` is; None on one node.
        rdzv_id: the same word on all nodes of one job.
        max_restarts: how often all ranks are started again after one failed.
        grace_time_s: what the ranks have after SIGTERM before they are killed.
    """

    nproc_per_node: int
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0
    grace_time_s: float = 60.0

    @property
    def world_size(self) -> int:
        """All ranks of the job."""
        return self.nproc_per_node * self.nnodes


def launch(plan: LaunchPlan, command: Sequence[str]) -> int:
    """Run ``python <command>`` on every rank of this node.

    Returns:
        0 if all ranks ended with 0; 2 if the first to fail blames its input; 1 otherwise. The first error has been
        printed.

    Raises:
        InputError: the nodes can't meet at the endpoint.
    """
    with tempfile.TemporaryDirectory(prefix="mm_trainer_") as log_dir, _environment(plan), _quiet_agent():
        from mm_trainer.elastic import run_agent

        failures = run_agent(plan, command, log_dir=log_dir, on_restart=_report_restart)
        return _report(failures) if failures else 0


@contextmanager
def _environment(plan: LaunchPlan) -> Iterator[None]:
    """Variables that the ranks, or the agent here, are to see."""
    cores = os.cpu_count() or 1
    wanted = {
        SUPERVISED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // plan.nproc_per_node))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are ours: the agent would kill on them
        # The store that the agent shares by default outlives a restart, with the addresses of dead ranks in it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's own log off the terminal: it repeats, at length, what is said here."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


# --- what went wrong ----------------------------------------------------------------------------------------------


def record_failure(environment: RankEnvironment, error: BaseException, exit_code: int) -> None:
    """Leave a rank's error for its launcher, ours or torchrun, in the form that both read."""
    if environment.error_file is None:
        return
    now = time.time()
    data = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorCode": exit_code,
            "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(now))},
        },
        "mm_trainer": {"time": now, "text": str(error)},
    }
    Path(environment.error_file).write_text(json.dumps(data), encoding="utf-8")


def _report(failures: Mapping[int, ProcessFailure]) -> int:
    """Print the first failure with its rank; returns the exit code that follows from it."""
    rank, first = min(failures.items(), key=lambda item: _order(item[1]))
    details = _details(first)
    said = f"mm-trainer: rank {rank} failed first"
    if first.exitcode < 0:
        print(f"{said}: it was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        return FAULT
    if details is None:
        print(f"{said}: it ended with code {first.exitcode} and left no reason", file=sys.stderr)
    elif first.exitcode == BAD_INPUT:
        print(f"{said}\nerror: {details['mm_trainer']['text']}", file=sys.stderr)
    else:
        print(f"{said}:\n{details['message']['extraInfo']['py_callstack']}", file=sys.stderr, end="")
    return BAD_INPUT if first.exitcode == BAD_INPUT else FAULT


def _report_restart(failures: Mapping[int, ProcessFailure]) -> None:
    _report(failures)
    print("mm-trainer: all ranks are started again", file=sys.stderr)


def _order(failure: ProcessFailure) -> tuple[int, float]:
    """A rank that was killed comes first: the errors of the others, who lost it, may be on record before."""
    details = _details(failure)
    return (0 if failure.exitcode < 0 else 1, details["mm_trainer"]["time"] if details else failure.timestamp)


def _details(failure: ProcessFailure) -> dict[str, Any] | None:
    data = failure.error_file_data
    return data if "mm_trainer" in data else None
