"""How many ranks to start, where, and the exit codes they end with."""

from __future__ import annotations

from dataclasses import dataclass

from mm_trainer.errors import InputError

FAULT = 1
"""Exit code of a run that failed through a fault of ours."""

BAD_INPUT = 2
"""Exit code of a run that was given bad input."""


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


def launch_plan(
    nproc_per_node: int | None, nnodes: int, rdzv_endpoint: str | None, rdzv_id: str | None, max_restarts: int
) -> LaunchPlan | None:
    """What the command line says; None where this process is to be the only rank.

    Raises:
        InputError: several nodes, and no place where they meet.
    """
    if nproc_per_node is None and nnodes == 1:
        return None
    if nnodes > 1 and rdzv_endpoint is None:
        raise InputError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the place where the nodes meet")
    return LaunchPlan(nproc_per_node or 1, nnodes, rdzv_endpoint, rdzv_id, max_restarts)
