"""torch's elastic agent as the launcher needs it; imported when ranks are started, since it imports torch."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from mm_trainer.errors import InputError
from mm_trainer.launch.plan import LaunchPlan

KILL_AFTER_GRACE_S = 15.0
PROBE_S = 30.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequested(BaseException):
    """A signal came while no rank was running: there is nobody to pass it on to, and none may be started.

    Not an `Exception`: it may be raised anywhere in torch's agent, and nothing there should catch it.
    """


class _Phase(Enum):
    NO_RANKS = auto()
    """Nodes meet, or failed ranks are cleared away."""
    STARTING = auto()
    """Processes exist whose ids aren't noted yet."""
    RUNNING = auto()


class RankAgent(LocalElasticAgent):
    """Starts the ranks of one node, and knows which of them failed on their own.

    [Note: signals] Handlers run in the thread that the agent works in, between two of its steps. A signal that comes
    while ranks run is handed on at once; one that comes while they are being started is kept, and handed on as soon as
    all their ids are known; one that comes while there are none ends the agent (`StopRequested`), which would otherwise
    start ranks that nobody wants any more, or first wait for other nodes. After any of them no rank is started.

    Args:
        plan: how many ranks, where.
        command: what each runs, after ``python``.
        log_dir: folder for the ranks' error files.
        on_restart: told the failures before the ranks are started again.

    Raises:
        InputError: the nodes can't meet at the endpoint.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        command: Sequence[str],
        *,
        log_dir: str,
        on_restart: Callable[[Mapping[int, ProcessFailure]], None],
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=plan.nproc_per_node,
            entrypoint=sys.executable,
            args=("-u", *command),
            rdzv_handler=get_rendezvous_handler(_rendezvous(plan)),
            max_restarts=plan.max_restarts,
            local_addr=None if plan.rdzv_endpoint else "localhost",
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir))
        self._on_restart = on_restart
        self._failures: dict[int, ProcessFailure] = {}
        self._phase = _Phase.NO_RANKS
        self._kept: signal.Signals | None = None
        self._stopping = False

    @property
    def failures(self) -> Mapping[int, ProcessFailure]:
        """Rank → failure, of the ranks that failed before the agent ended the others."""
        return self._failures

    def request_stop(self, number: signal.Signals) -> None:
        """Hand a signal on, see [Note: signals]; to be called in the agent's own thread.

        Raises:
            StopRequested: there are no ranks; raised once, since a second one would cut the cleanup short.
        """
        is_first, self._stopping = not self._stopping, True
        if self._phase is _Phase.RUNNING:
            self.signal_ranks(number)
        elif self._phase is _Phase.STARTING:
            self._kept = number
        elif is_first:
            raise StopRequested

    def signal_ranks(self, number: signal.Signals) -> None:
        """Send a signal to every rank of this node that runs; none is started again after that."""
        # Or the agent would take the ranks' end for a failure and start them again.
        self._remaining_restarts = 0
        for worker in self.get_worker_group().workers:
            if worker.id and _is_child(worker.id):  # the process id, once it is started
                try:
                    os.kill(worker.id, number)
                except ProcessLookupError:
                    continue  # it has ended

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._phase = _Phase.NO_RANKS
        super()._initialize_workers(worker_group)
        self._phase = _Phase.RUNNING
        if self._kept is not None:
            self.signal_ranks(self._kept)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stopping:
            raise StopRequested
        self._phase = _Phase.STARTING
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before the agent looks: once it sees one failure it kills the other ranks, which then look failed too.
        failed = {worker.id for worker in worker_group.workers if _has_failed(worker.id)}
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            by_themselves = {rank: f for rank, f in result.failures.items() if f.pid in failed}
            self._failures = by_themselves or result.failures
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._stopping and worker_group.state is WorkerState.HEALTHY:
            return  # another node starts its ranks again; ours are saving, and end by themselves
        self._phase = _Phase.NO_RANKS
        if self._stopping:  # since the agent decided to start the ranks again
            raise StopRequested
        self._on_restart(self._failures)
        super()._restart_workers(worker_group)


def _is_child(pid: int) -> bool:
    """Whether a process id is still ours: once a child has been waited for, another program may get its id."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_failed(pid: int) -> bool:
    """Whether a child has just ended with another code than 0; leaves it to be waited for."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # waited for earlier, so it ended with 0: the agent would have stopped otherwise
    return ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0)


@contextmanager
def forward_signals(agent: RankAgent, grace_time_s: float) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP go to the ranks as SIGTERM, and they save and end by themselves.

    A second signal goes to them as well; what still runs some time after the grace time is killed. A signal that this
    process was started to ignore (``nohup``) stays ignored.
    """
    timers: list[threading.Timer] = []

    def forward(number: int, frame: FrameType | None) -> None:
        agent.request_stop(signal.SIGTERM)
        if not timers:
            timer = threading.Timer(grace_time_s + KILL_AFTER_GRACE_S, agent.signal_ranks, (signal.SIGKILL,))
            # It must not keep this process alive after the ranks have ended.
            timer.daemon = True
            timer.start()
            timers.append(timer)

    heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()


def _rendezvous(plan: LaunchPlan) -> RendezvousParameters:
    is_host = plan.rdzv_endpoint is None or hosts_endpoint(plan.rdzv_endpoint)
    return RendezvousParameters(
        backend="c10d",
        endpoint=plan.rdzv_endpoint or "localhost:0",  # port 0: any free one
        run_id=plan.rdzv_id or uuid.uuid4().hex,
        min_nodes=plan.nnodes,
        max_nodes=plan.nnodes,
        is_host=str(is_host),
    )


def hosts_endpoint(endpoint: str) -> bool:
    """Whether the nodes' meeting point is to be served by this process.

    torch would wait forever for an answer from a port that another program has taken, so we check first.

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
        # As servers do, or a port whose last connections linger in TIME_WAIT would look taken.
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
    """Refuse a port on which no agent answers; asked from a separate process, since the call may never return."""
    ask = f"from torch.distributed import TCPStore; TCPStore({host!r}, {port}, is_master=False, wait_for_workers=False)"
    try:
        subprocess.run([sys.executable, "-c", ask], timeout=PROBE_S, check=True, capture_output=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise InputError(
            f"--rdzv-endpoint: port {port} of {host} is taken by another program; name another port (on one node leave "
            "the option out: a free port is found)"
        ) from error


def run_agent(
    plan: LaunchPlan,
    command: Sequence[str],
    *,
    log_dir: str,
    on_restart: Callable[[Mapping[int, ProcessFailure]], None],
) -> Mapping[int, ProcessFailure]:
    """Start the ranks and wait for their end.

    Returns:
        rank → failure; empty if all ended with 0, or if a signal came before the first of them was started.
    """
    try:
        agent = RankAgent(plan, command, log_dir=log_dir, on_restart=on_restart)
    except RendezvousConnectionError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise InputError(f"the nodes can't meet at --rdzv-endpoint {plan.rdzv_endpoint}: {reason}") from error
    try:
        with forward_signals(agent, plan.grace_time_s):
            result = agent.run()
    except StopRequested:
        print("mm-trainer: asked to stop while no rank was running; none is started", file=sys.stderr)
        return agent.failures
    finally:
        # On every way out: the other nodes would wait for this one.
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    return agent.failures if result.is_failed() else {}
