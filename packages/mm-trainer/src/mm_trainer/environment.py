"""What the launcher tells a rank. The one place where the environment of a process is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from mm_trainer.errors import InputError


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place among the ranks, as torchrun states it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool
    """Whether a launcher started this process; without one it is the only rank."""

    @classmethod
    def read(cls) -> Self:
        """Read torchrun's variables; all or none of them must be set."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        present = [name for name in names if name in os.environ]
        if not present:
            return cls(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)
        absent = [name for name in names if name not in os.environ]
        if absent:
            raise InputError(
                f"{', '.join(present)} are set but {', '.join(absent)} are not: start ranks with torchrun or with "
                "`mm-trainer train --nproc-per-node N`, or unset them for a single process"
            )
        rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in names[:4])
        return cls(rank, local_rank, world_size, local_world_size, launched=True)
