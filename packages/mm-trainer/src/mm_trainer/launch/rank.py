"""What a launcher tells a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnvironment:
    """Which rank this process is, as torchrun and our launcher tell it.

    Args:
        rank: 0 … world_size − 1.
        local_rank: the same on this host.
        world_size: all ranks.
        restarts: how often the ranks were started again after a failure.
        supervised: started by our own launcher, which prints the first error itself.
        error_file: where the launcher wants to be told what went wrong.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    restarts: int = 0
    supervised: bool = False
    error_file: str | None = None

    @classmethod
    def read(cls) -> RankEnvironment | None:
        """The rank that this process is, or None in a process that isn't one."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ["WORLD_SIZE"]),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            supervised=SUPERVISED in os.environ,
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
        )


SUPERVISED = "MM_TRAINER_SUPERVISED"
"""Set by our launcher in the ranks it starts."""
