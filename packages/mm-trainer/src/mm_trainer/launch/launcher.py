"""Start the ranks of one node, and say once what went wrong.

torch's elastic agent starts a process per rank, starts them again if asked to, and ends all when one fails. Here and in
`mm_trainer.launch.agent` it learns to pass SIGTERM on and wait for the ranks' checkpoint, to print the first error
with its rank, and to return that rank's exit code.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mm_trainer.launch.failures import report, report_restart
from mm_trainer.launch.plan import LaunchPlan
from mm_trainer.launch.rank import SUPERVISED


def launch(plan: LaunchPlan, command: Sequence[str]) -> int:
    """Run ``python <command>`` on every rank of this node.

    Returns:
        0 if all ranks ended with 0; 2 if the first to fail blames its input; 1 otherwise. The first error has been
        printed.

    Raises:
        InputError: the nodes can't meet at the endpoint.
    """
    with tempfile.TemporaryDirectory(prefix="mm_trainer_") as log_dir, _environment(plan), _quiet_agent():
        # Imported only here: it imports torch, which the rest of the launcher does without.
        from mm_trainer.launch.agent import run_agent

        failures = run_agent(plan, command, log_dir=log_dir, on_restart=report_restart)
        return report(failures) if failures else 0


@contextmanager
def _environment(plan: LaunchPlan) -> Iterator[None]:
    """Variables that the ranks, or the agent here, are to see."""
    cores = os.cpu_count() or 1
    wanted = {
        SUPERVISED: "1",
        # Divided among the ranks: each would otherwise start a thread per core.
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
    """Keep the agent's own log off the terminal: it repeats at length what is reported here."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
