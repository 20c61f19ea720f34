"""Start the ranks of one node through torch's elastic agent, and say once what went wrong.

The agent starts a process per rank, starts them again if asked to, and ends all when one fails. What it does not do is
done here: pass SIGTERM on and wait for the ranks' checkpoint, print the first error and its rank, return its exit code.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mm_trainer.config.environment import SUPERVISED, RankEnvironment
from mm_trainer.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAULT, BAD_INPUT = 1, 2
_KILL_AFTER_GRACE_S = 15.0
_PROBE_S = 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    with tempfile.TemporaryDirectory(prefix="mm_trainer_") as log_dir, _environment(plan), _quiet_agent():
        try:
            agent = _make_agent(plan, command, log_dir)
        except RendezvousConnectionError as error:
            raise InputError(
                f"the nodes can't meet at --rdzv-endpoint {plan.rdzv_endpoint}: {_root_cause(error)}"
            ) from error
        with _forward_signals(agent, plan.grace_time_s):
            result = agent.run()
        agent.get_worker_group().spec.rdzv_handler.shutdown()
        if not result.is_failed():
            return 0
        return _report(result.failures)


def _make_agent(plan: LaunchPlan, command: Sequence[str], log_dir: str) -> LocalElasticAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    is_host = plan.rdzv_endpoint is None or hosts_endpoint(plan.rdzv_endpoint)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=plan.rdzv_endpoint or "localhost:0",  # port 0: whichever is free
        run_id=plan.rdzv_id or uuid.uuid4().hex,
        min_nodes=plan.nnodes,
        max_nodes=plan.nnodes,
        is_host=str(is_host),
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=plan.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", *command),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=plan.max_restarts,
        local_addr=None if plan.rdzv_endpoint else "localhost",
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=log_dir))


def hosts_endpoint(endpoint: str) -> bool:
    """Whether the nodes' meeting point is to be served by this process.

    torch would wait without end for an answer from a port that another program has taken; so that is found out first.

    Args:
        endpoint: ``host:port``.

    Raises:
        InputError: not of that form, an unknown host, or a port of this machine that another program uses.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--rdzv-endpoint: expected HOST:PORT, got {endpoint!r}")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(f"--rdzv-endpoint: the host {host!r} is not known: {error.strerror}") from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                _require_store(host, int(port))  # another agent of this job may be on the same machine
                return False
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise InputError(f"--rdzv-endpoint: can't use port {port} here: {error.strerror}") from error
    return True


def _require_store(host: str, port: int) -> None:
    """Refuse a port on which no agent answers."""
    from torch.distributed import DistError, TCPStore

    answered = threading.Event()

    def connect() -> None:
        try:
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_PROBE_S))
        except DistError:
            return
        answered.set()

    threading.Thread(target=connect, daemon=True).start()  # it may never return
    if not answered.wait(_PROBE_S):
        raise InputError(
            f"--rdzv-endpoint: port {port} of {host} is taken by another program; name another port (on one node leave "
            "the option out: a free port is found)"
        )


@contextmanager
def _environment(plan: LaunchPlan) -> Iterator[None]:
    """Variables that the ranks, or the agent here, are to see."""
    cores = os.cpu_count() or 1
    wanted = {
        SUPERVISED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // plan.nproc_per_node))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are ours: the agent would kill on them
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


@contextmanager
def _forward_signals(agent: LocalElasticAgent, grace_time_s: float) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP go to the ranks, which save and end; a second one, or the end of the grace time with
    some margin, is for those that don't."""
    watchdog: list[threading.Timer] = []

    def forward(number: int, frame: FrameType | None) -> None:
        agent._remaining_restarts = 0  # whatever comes now, nothing is started again
        _signal_ranks(agent, signal.SIGTERM)
        if not watchdog:
            timer = threading.Timer(grace_time_s + _KILL_AFTER_GRACE_S, _signal_ranks, (agent, signal.SIGKILL))
            timer.daemon = True
            timer.start()
            watchdog.append(timer)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in watchdog:
            timer.cancel()


def _signal_ranks(agent: LocalElasticAgent, number: signal.Signals) -> None:
    for worker in agent.get_worker_group().workers:
        if worker.id:  # the process id, once it is started
            try:
                os.kill(worker.id, number)
            except ProcessLookupError:
                continue  # it has ended


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
    said = f"rank {rank} failed first"
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        print(f"mm-trainer: {said}: it was killed by {name}", file=sys.stderr)
        return FAULT
    if details is None:
        print(f"mm-trainer: {said}: it ended with code {first.exitcode} and left no reason", file=sys.stderr)
    elif first.exitcode == BAD_INPUT:
        print(f"mm-trainer: {said}\nerror: {details['mm_trainer']['text']}", file=sys.stderr)
    else:
        print(f"mm-trainer: {said}:\n{details['message']['extraInfo']['py_callstack']}", file=sys.stderr, end="")
    return BAD_INPUT if first.exitcode == BAD_INPUT else FAULT


def _order(failure: ProcessFailure) -> tuple[int, float]:
    """A rank that was killed comes first: the errors of the others, who lost it, may be on record before."""
    details = _details(failure)
    return (0 if failure.exitcode < 0 else 1, details["mm_trainer"]["time"] if details else failure.timestamp)


def _details(failure: ProcessFailure) -> dict[str, Any] | None:
    data = failure.error_file_data
    return data if "mm_trainer" in data else None


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0]
