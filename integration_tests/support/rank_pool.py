"""One pool of ranks per test session, as a pytest plugin.

Importing torch (3 s) and diffusers (8 s) is what a small multi-rank test costs, not its maths. So one helper process
(the *zygote*) imports them once, and every test forks its ranks from it: a fresh interpreter state per test, at the
price of a fork. A rank that dies or hangs is killed and named; it can't reach the next test.

    def work(rank, world_size, factor):          # module level, so that the zygote can import it
        ...
    def test_it(run_ranks):
        assert run_ranks(work, 2, 3) == [0, 3]
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


@dataclass(frozen=True)
class Job:
    module: str
    function: str
    world_size: int
    args: tuple[Any, ...]
    timeout: float
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    environ: dict[str, str]
    init_process_group: bool


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message carries every failed rank's traceback."""


class RankPool:
    """Runs functions on forked gloo ranks; the zygote starts on first use."""

    def __init__(self) -> None:
        self._zygote: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def __call__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        preload: tuple[str, ...] = (),
        init_process_group: bool = True,
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on ``world_size`` ranks; return the results in rank order."""
        job = Job(
            module=function.__module__,
            function=function.__qualname__,
            world_size=world_size,
            args=args,
            timeout=timeout,
            preload=preload,
            sys_path=tuple(sys.path),
            environ=dict(os.environ),
            init_process_group=init_process_group,
        )
        connection = self._connect()
        connection.send(job)
        # The zygote may first have to import heavy modules, so it gets time beyond the job's own limit.
        if not connection.poll(timeout + 180):
            self.close()
            raise RankFailure(f"{function.__qualname__}: the rank pool gave no answer")
        outcomes = connection.recv()
        if isinstance(outcomes, str):
            raise RankFailure(outcomes)
        failures = [f"--- rank {rank}\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            raise RankFailure("\n".join([f"{function.__qualname__} failed on {len(failures)} rank(s)", *failures]))
        return [pickle.loads(value) for _, value in outcomes]

    def _connect(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._zygote = context.Process(target=_zygote_main, args=(theirs,), daemon=False)
            self._zygote.start()
            theirs.close()
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._zygote is not None:
            self._zygote.join(timeout=5)
            if self._zygote.is_alive():
                self._zygote.kill()
            self._zygote = None


def _zygote_main(connection: Connection) -> None:
    # What DTensor, FSDP2 and DCP import on first use takes seconds: once here, not in every forked rank.
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            sys.path[:] = job.sys_path
            for name in (*job.preload, job.module):
                importlib.import_module(name)
            answer: Any = _run(job)
        except BaseException:  # noqa: BLE001 - whatever went wrong is the test's failure message
            answer = traceback.format_exc()
        connection.send(answer)


def _run(job: Job) -> list[tuple[bool, Any]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = []
        for rank in range(job.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(job, rank, store, theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        outcomes = _collect(ranks, job.timeout)
        for _, ours in ranks:
            with contextlib.suppress(OSError):  # a rank that failed is gone
                ours.send("leave")
        for process, ours in ranks:
            if process.is_alive():
                process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()
    return outcomes


def _collect(ranks: list[Any], timeout: float) -> list[tuple[bool, Any]]:
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(ranks):
        pending = {ours: rank for rank, (_, ours) in enumerate(ranks) if rank not in outcomes}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        for ours in ready:
            rank = pending[ours]  # type: ignore[index]
            try:
                outcomes[rank] = ours.recv()  # type: ignore[union-attr]
            except EOFError:
                ranks[rank][0].join()
                outcomes[rank] = (False, f"died with exit code {ranks[rank][0].exitcode}")
        failed = any(not ok for ok, _ in outcomes.values())
        if failed:  # its peers may sit in a collective for ever: give them a moment to fail by themselves
            deadline = min(deadline, time.monotonic() + 10)
        if not ready and time.monotonic() >= deadline:
            for rank in pending.values():
                outcomes[rank] = (False, "still running when its time was up")
                ranks[rank][0].kill()
    return [outcomes[rank] for rank in range(len(ranks))]


def _rank_main(job: Job, rank: int, store: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(job.environ)
    torch.set_num_threads(1)
    try:
        function = importlib.import_module(job.module)
        for part in job.function.split("."):
            function = getattr(function, part)
        if job.init_process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.timeout),
            )
        outcome = (True, pickle.dumps(function(rank, job.world_size, *job.args)))  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 - reported to the test, whatever it is
        outcome = (False, traceback.format_exc())
    connection.send(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome[0]:
        # A peer may still be connecting to this rank for a group made last: leaving now would fail it.
        connection.poll(job.timeout)
    # Skip interpreter shutdown: a forked rank owns none of the zygote's atexit work, and gloo threads may linger.
    os._exit(0 if outcome[0] else 1)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankPool]:
    """The session's pool: ``run_ranks(function, world_size, *args, timeout=…, preload=(…))``."""
    pool = RankPool()
    yield pool
    pool.close()
