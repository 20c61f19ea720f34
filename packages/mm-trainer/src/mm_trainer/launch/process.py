"""One rank's process: its log, its device and its process group."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mm_parallel import default_device_type, device_count, process_group_backend
from mm_trainer.errors import InputError
from mm_trainer.launch.rank import RankEnvironment


def set_up_logging(rank: int) -> None:
    """Rank 0 reports what happens; the others only what goes wrong."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
        stream=sys.stderr,
        force=True,
    )


def pick_device(local_rank: int) -> str:
    """Make this rank's accelerator the current one; returns its type, ``cpu`` where there is none.

    Raises:
        InputError: more ranks were started on this machine than it has devices.
    """
    device_type = default_device_type()
    if device_type != "cpu":
        if local_rank >= device_count():
            raise InputError(
                f"rank {local_rank} of this machine has no device of its own: there are {device_count()} of type "
                f"{device_type}; start at most that many ranks here"
            )
        torch.accelerator.set_device_index(local_rank)
    return device_type


@contextmanager
def process_group(environment: RankEnvironment | None, device_type: str, *, timeout_s: float) -> Iterator[None]:
    """The default process group, with a CPU backend besides the device's (asynchronous saves need one).

    Args:
        environment: None for a single process that no launcher started; it meets itself over a file, which needs no
            port and can't collide with another job.
    """
    timeout = timedelta(seconds=timeout_s)
    rank = environment or RankEnvironment()
    with tempfile.TemporaryDirectory() as folder:
        if environment is None:
            store: dist.Store = dist.FileStore(f"{folder}/store", 1)
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            process_group_backend(device_type),
            # torchrun's store outlives its ranks: without a name of their own, restarted ones would meet the dead.
            store=dist.PrefixStore(f"mm_trainer/{rank.restarts}", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
        )
        # No collective on the way out of an error: peers may be gone. The process's end tears the group down.
        yield
        dist.destroy_process_group()
