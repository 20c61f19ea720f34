"""The launcher: exit codes, the first error with its rank, signals, restarts, ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cfg_helpers import SINGLE, TESTS, cli_environment, run_cli, write
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from mm_trainer.errors import InputError
from mm_trainer.launch import agent as elastic
from mm_trainer.launch.agent import hosts_endpoint
from mm_trainer.launch.launcher import launch
from mm_trainer.launch.plan import LaunchPlan

RANK = str(TESTS / "cfg_rank.py")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another program listens, and answers nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} didn't appear"
        time.sleep(0.02)


def test_all_ranks_run_and_end_with_0(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(LaunchPlan(3), [RANK, "fine", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.0", "rank1.0", "rank2.0"]
    assert (tmp_path / "rank2.0").read_text() == "3 True"
    assert capfd.readouterr().err == ""


def test_a_failing_rank_ends_all_and_its_error_is_the_last_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B100, B104: the true reason once, with its rank; the code isn't 0; well within a minute."""
    start = time.monotonic()
    assert launch(LaunchPlan(2), [RANK, "fault", str(tmp_path)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "mm-trainer: rank 1 failed first:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: rank one's reason"
    assert sum("rank one's reason" in line for line in lines) == 2  # the source line, and the reason
    assert time.monotonic() - start < 20


def test_bad_input_on_one_rank_is_one_message_and_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(LaunchPlan(2), [RANK, "bad_input", str(tmp_path)]) == 2
    assert capfd.readouterr().err == "mm-trainer: rank 1 failed first\nerror: rank one's reason\n"


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(LaunchPlan(2), [RANK, "killed", str(tmp_path)]) == 1
    assert capfd.readouterr().err == "mm-trainer: rank 1 failed first: it was killed by SIGKILL\n"


def test_ranks_are_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(LaunchPlan(2, max_restarts=1), [RANK, "restart", str(tmp_path)]) == 0
    assert capfd.readouterr().err == (
        "mm-trainer: rank 1 failed first: it ended with code 1 and left no reason\n"
        "mm-trainer: all ranks are started again\n"
    )
    assert (tmp_path / "rank0.1").exists()
    assert (tmp_path / "rank1.1").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_ranks_which_save(tmp_path: Path, number: signal.Signals) -> None:
    """The ranks get SIGTERM, end by themselves, and the launcher's code is theirs: 0."""
    ready = [tmp_path / f"ready{rank}" for rank in range(2)]

    def stop() -> None:
        wait_for(*ready)
        os.kill(os.getpid(), number)

    def ours(number: int, frame: object) -> None:
        raise AssertionError("the launcher didn't take the signal")

    # A suite in the background may have been started to ignore SIGINT, which the launcher would respect.
    outside = signal.signal(number, ours)
    try:
        threading.Thread(target=stop).start()
        assert launch(LaunchPlan(2, max_restarts=3), [RANK, "graceful", str(tmp_path)]) == 0
        assert signal.getsignal(number) is ours
    finally:
        signal.signal(number, outside)
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def signal_in(
    monkeypatch: pytest.MonkeyPatch, method: str, *, before: bool = False, prepare: Callable[[], None] = lambda: None
) -> None:
    """Let SIGTERM reach the launcher inside a step of torch's agent, at its beginning or its end, once."""
    original, sent = getattr(LocalElasticAgent, method), []

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        result = None if before and not sent else original(self, *arguments, **options)
        if not sent:
            sent.append(True)
            prepare()
            signal.raise_signal(signal.SIGTERM)
            if before:
                result = original(self, *arguments, **options)
        return result

    monkeypatch.setattr(LocalElasticAgent, method, step)


def test_a_signal_between_a_rank_s_start_and_the_note_of_its_id_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks run by then, and neither is known."""
    signal_in(monkeypatch, "_start_workers", prepare=lambda: wait_for(tmp_path / "ready0", tmp_path / "ready1"))
    start = time.monotonic()
    assert launch(LaunchPlan(2, max_restarts=3), [RANK, "graceful", str(tmp_path)]) == 0
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert time.monotonic() - start < elastic.KILL_AFTER_GRACE_S, "they weren't left to be killed"


def test_a_signal_before_any_rank_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    signal_in(monkeypatch, "_rendezvous", before=True)
    assert launch(LaunchPlan(2, max_restarts=3), [RANK, "graceful", str(tmp_path)]) == 0
    assert capfd.readouterr().err == "mm-trainer: asked to stop while no rank was running; none is started\n"
    assert list(tmp_path.iterdir()) == []


def test_a_signal_between_the_decision_to_restart_and_the_restart_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks have ended, and the agent no longer asks whether it may start them again."""
    restart = elastic.RankAgent._restart_workers

    def signalled(self: elastic.RankAgent, group: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        restart(self, group)

    monkeypatch.setattr(elastic.RankAgent, "_restart_workers", signalled)
    assert launch(LaunchPlan(2, max_restarts=1), [RANK, "restart", str(tmp_path)]) == 1
    assert not (tmp_path / "rank0.1").exists()
    assert "started again" not in capfd.readouterr().err


def test_another_node_s_restart_doesn_t_start_ranks_that_were_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left to save and end, and none takes their place."""
    waiting = iter([1])

    def num_nodes_waiting(self: DynamicRendezvousHandler) -> int:
        wait_for(tmp_path / "ready0", tmp_path / "ready1")
        number = next(waiting, 0)
        if number:
            signal.raise_signal(signal.SIGTERM)
        return number

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", num_nodes_waiting)
    monkeypatch.setattr(elastic, "KILL_AFTER_GRACE_S", 0.0)
    assert launch(LaunchPlan(2, grace_time_s=15), [RANK, "graceful", str(tmp_path)]) == 0
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_a_second_signal_doesn_t_interrupt_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are still being cleared away then: cut short, some would be left running."""
    signal_in(monkeypatch, "_rendezvous", before=True)
    original, ended = LocalElasticAgent._shutdown, []

    def shutdown(self: LocalElasticAgent, *arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        original(self, *arguments, **options)
        ended.append(True)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    assert launch(LaunchPlan(2), [RANK, "graceful", str(tmp_path)]) == 0
    assert ended == [True]


def test_a_signal_after_the_ranks_end_reaches_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes are waited for then; a process id that was ours may be another program's by now."""
    signal_in(monkeypatch, "_exit_barrier")
    signalled: list[int] = []
    monkeypatch.setattr(elastic.os, "kill", lambda pid, number: signalled.append(pid))
    assert launch(LaunchPlan(2), [RANK, "fine", str(tmp_path)]) == 0
    assert signalled == []


@pytest.mark.parametrize("method", ["_stop_workers", "_rendezvous"])
def test_a_signal_between_two_starts_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    """The failure has been reported, and decides the exit code."""
    monkeypatch.setattr(
        elastic.RankAgent,
        "_restart_workers",
        lambda self, group, restart=elastic.RankAgent._restart_workers: (
            signal_in(monkeypatch, method, before=True),
            restart(self, group),
        ),
    )
    assert launch(LaunchPlan(2, max_restarts=1), [RANK, "restart", str(tmp_path)]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert "mm-trainer: asked to stop while no rank was running; none is started" in lines
    assert not (tmp_path / "rank0.1").exists()


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "KILL_AFTER_GRACE_S", 0.2)

    def stop() -> None:
        wait_for(*[tmp_path / f"ready{rank}" for rank in range(2)])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    start = time.monotonic()
    plan = LaunchPlan(2, max_restarts=3, grace_time_s=0.3)
    assert launch(plan, [RANK, "deaf", str(tmp_path)]) == 1
    assert time.monotonic() - start < 20
    assert "killed by SIGKILL" in capfd.readouterr().err


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    class Agent:
        def request_stop(self, number: signal.Signals) -> None:
            raise AssertionError("the ranks were signalled")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with elastic.forward_signals(Agent(), 1.0):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# --- ports --------------------------------------------------------------------------------------------------------


def test_one_node_takes_a_free_port(tmp_path: Path) -> None:
    """B102: two jobs at once on one machine, the usual port taken besides."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # or somebody else has it: taken all the same
            server.bind(("127.0.0.1", 29500))
            server.listen()
        command = [
            sys.executable,
            "-c",
            f"from mm_trainer.launch.launcher import *; print(launch(LaunchPlan(2), {[RANK, 'fine', '.']}))",
        ]
        jobs = [
            subprocess.Popen(command, cwd=tmp_path, env=cli_environment(), stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [job.communicate(timeout=60)[0].strip() for job in jobs] == ["0", "0"]


def test_a_taken_port_is_named(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B102: the message names the port."""
    monkeypatch.setattr(elastic, "PROBE_S", 4)
    with pytest.raises(InputError, match=f"port {taken_port} of 127.0.0.1 is taken by another program"):
        hosts_endpoint(f"127.0.0.1:{taken_port}")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("host", "expected HOST:PORT, got 'host'"),
        ("host:", "expected HOST:PORT"),
        (":29500", "expected HOST:PORT"),
        ("host:port", "expected HOST:PORT"),
        ("host:99999", "expected HOST:PORT"),
        ("no-such-host.invalid:29500", "the host 'no-such-host.invalid' is not known"),
    ],
)
def test_a_wrong_endpoint(endpoint: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        hosts_endpoint(endpoint)


def test_another_host_serves_its_own_port() -> None:
    assert hosts_endpoint("192.0.2.1:29500") is False  # an address kept for documentation


@pytest.mark.slow
def test_two_launchers_on_one_machine_are_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    code = (
        "from mm_trainer.launch.launcher import *\n"
        f"plan = LaunchPlan(1, nnodes=2, rdzv_endpoint='127.0.0.1:{port}', rdzv_id='job')\n"
        f"print(launch(plan, {[RANK, 'fine', '.']}))"
    )
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, env=cli_environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [node.communicate(timeout=100)[0].strip() for node in nodes] == ["0", "0"]
    assert (tmp_path / "rank1.0").read_text() == "2 True"


# --- the whole way ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_on_two_ranks_and_its_failure(tmp_path: Path) -> None:
    """B100, B104: a forward that fails on rank 1 only."""
    config = write(tmp_path, SINGLE)
    done = run_cli(["train", config, "--nproc-per-node", "2"], tmp_path, timeout=120)
    assert (done.code, "step=3" in done.err) == (0, True), done.err
    start = time.monotonic()
    done = run_cli(
        ["train", config, "model.fail_rank=1", "training.save=other", "--nproc-per-node", "2"], tmp_path, timeout=120
    )
    assert done.code == 1
    assert "mm-trainer: rank 1 failed first:" in done.err
    assert done.err.splitlines()[-1] == "RuntimeError: boom"
    assert "typer/" not in done.err
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """Automatic restart: all ranks start again and resume from the newest complete checkpoint."""
    changes = ["training.train_iters=12", "training.save_interval=4", "training.save_async=false", "training.load=auto"]
    death = ["model.fail_rank=1", "model.die_in_forward=7"]
    command = ["train", write(tmp_path, SINGLE), *changes, *death, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run_cli(command, tmp_path, timeout=150)
    assert done.code == 0, done.err
    assert "mm-trainer: rank 1 failed first: it was killed by SIGKILL\nmm-trainer: all ranks are started" in done.err
    assert "iter_0000004" in done.err.split("started again")[1]
    assert "step=12 " in done.err


@pytest.mark.slow
def test_two_torchrun_agents_are_two_nodes(tmp_path: Path) -> None:
    """torchrun on several nodes, as two agents on this machine; the same command as each rank."""
    config = write(tmp_path, SINGLE)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", "mm_trainer", "train", config, "training.lr=2e-3"),
            ],
            cwd=tmp_path,
            env=cli_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum("step=3" in output for output in outputs) == 1
    assert (tmp_path / "run" / "iter_0000003" / "manifest.json").exists()


@pytest.mark.slow
def test_torchrun_shows_bad_input_once(tmp_path: Path) -> None:
    """Under bare torchrun the message appears once, from rank 0, above torchrun's own report."""
    config = write(tmp_path, SINGLE.replace("lr: 1e-3", "lr: fast"))
    done = run_cli(
        ["--nproc-per-node=2", "-m", "mm_trainer", "train", config],
        tmp_path,
        timeout=120,
        python=("-m", "torch.distributed.run"),
    )
    assert done.code == 1  # torchrun's own; the ranks' is in its report
    assert done.err.count("error: ") == 1
    assert "exitcode  : 2" in done.err
    assert "Traceback" not in done.err.split("error: ")[0]
