"""``kill -9`` at random moments of a save, a background save, a save on two ranks, a conversion and a cache's filling.

    python scripts/kill_rounds.py [--rounds 100] [--megabytes 24] [--seed 0] [--folder DIR]

After every kill the disk has to be as promised: the newest complete iteration is at least the last one that the killed
process reported, every byte of it verifies and loads to the values of its step; a conversion's destination is absent or
whole; a cache loads. The next round goes on from there. Exits with 1 at the first broken promise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensor imports it on first use; here, so that the children fork ready to work
from safetensors.torch import save_file

from mm_checkpoint import CheckpointManager, WeightSourceConfig, convert, load_weights, resolve_source, verify

TENSORS = 4


def make_state(step: int, numel: int) -> dict[str, Any]:
    """A state whose every element says which step it belongs to."""
    tensors = {f"t{i}": torch.full((numel // TENSORS,), float(step)) for i in range(TENSORS)}
    return {"model": tensors, "train": {"step": step}}


def newest_step(folder: Path, numel: int) -> int:
    """Verify and load the newest complete iteration; its step, 0 if there is none."""
    manager = CheckpointManager(folder)
    newest = manager.latest()
    if newest is None:
        return 0
    result = verify(newest)
    assert result.ok, result.problems
    state = make_state(-1, numel)
    step = manager.load(newest, {"model": state["model"], "train": None})["train"]["step"]
    assert newest.name == f"iter_{step:07d}"
    assert all((tensor == step).all() for tensor in state["model"].values()), f"{newest}: values of another step"
    return step


def save_for_ever(folder: Path, numel: int, report: Callable[[int], None], *, asynchronous: bool) -> None:
    step = newest_step(folder, numel)
    manager = CheckpointManager(folder, keep_last=2, async_save=asynchronous)
    manager.prepare(step)
    state = make_state(step, numel)
    report(step)
    while True:
        step += 1
        for tensor in state["model"].values():
            tensor.fill_(step)
        state["train"]["step"] = step
        manager.save(step, state)
        report(step - 1 if asynchronous else step)


def save_on_two_ranks(folder: Path, numel: int, report: Callable[[int], None], *, rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    manager = CheckpointManager(folder, keep_last=2)
    newest = manager.latest()
    step = 0 if newest is None else int(newest.name.removeprefix("iter_"))
    manager.prepare(step)
    report(step)
    while True:
        step += 1
        state = make_state(step, numel // 2)
        state["model"] = {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in state["model"].items()}
        try:
            manager.save(step, state)
        except RuntimeError as error:
            assert "gloo" in str(error)  # noqa: PT017 - the other rank was killed
            return
        if rank == 0:
            report(step)


def convert_twice(folder: Path, numel: int, report: Callable[[int], None]) -> None:
    report(0)
    for to in ("dcp", "diffusers"):
        convert(folder / "source", folder / to, to=to, workers=2, max_shard_size=numel)
        report(1)


def load_from_cache(folder: Path, numel: int) -> None:
    """Load through the cache, converting if need be, and check every value."""
    config = WeightSourceConfig(
        from_pretrained=str(folder / "source"), load_format="dcp", dcp_cache_dir=str(folder / "cache")
    )
    module = torch.nn.ParameterDict({name: torch.zeros(numel // TENSORS) for name in (f"t{i}" for i in range(TENSORS))})
    load_weights(module, resolve_source(config))
    assert all((tensor == 7).all() for tensor in module.values())


def fill_cache(folder: Path, numel: int, report: Callable[[int], None]) -> None:
    shutil.rmtree(folder / "cache" / "iter_0000000", ignore_errors=True)
    report(0)
    load_from_cache(folder, numel)
    report(1)


class Child:
    """A forked process that reports numbers through a pipe until it is killed."""

    def __init__(self, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            # torch replaces its thread pool after a fork, unguarded: here, before two threads of a save do so at once.
            torch.set_num_threads(1)
            try:
                work(*args, lambda number: os.write(write, f"{number}\n".encode()), **kwargs)
                status = 0
            except BaseException:  # noqa: BLE001 - the parent reports it
                traceback.print_exc()
                status = 1
            os._exit(status)
        os.close(write)
        self._pipe = os.fdopen(self._read)

    def wait_until_ready(self) -> None:
        """Until its first report, which says that work begins."""
        self._pipe.readline()

    def kill(self) -> list[int]:
        """Kill it, unless it has ended by itself; everything that it reported."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with self._pipe:
            numbers = [int(line) for line in self._pipe.read().split()]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
        return numbers


def run_round(mode: str, folder: Path, numel: int, delay: float, rng: random.Random) -> str:
    """One kill; what state the disk was in."""
    if mode == "ranks":
        store = tempfile.mktemp(dir=folder)
        children = [Child(save_on_two_ranks, folder / mode, numel, rank=rank, store=store) for rank in range(2)]
        rng.shuffle(children)
    elif mode in ("save", "async"):
        children = [Child(save_for_ever, folder / mode, numel, asynchronous=mode == "async")]
    else:
        for to in ("dcp", "diffusers"):
            shutil.rmtree(folder / to, ignore_errors=True)
        children = [Child(convert_twice if mode == "convert" else fill_cache, folder, numel)]
    for child in children:
        child.wait_until_ready()
    time.sleep(delay)
    reported = max((number for child in children for number in child.kill()), default=0)
    if mode == "cache":
        whole = (folder / "cache" / "iter_0000000").exists()
        load_from_cache(folder, numel)
        return "found whole" if whole else "absent, converted again"
    if mode == "convert":
        present = [folder / to for to in ("dcp", "diffusers") if (folder / to).exists()]
        for path in present:
            result = verify(path)
            assert result.ok, result.problems
        assert verify(folder / "source").ok
        return f"{len(present)} whole"
    found = newest_step(folder / mode, numel)
    assert found >= reported, f"{mode}: {reported} was complete, now the newest is {found}"
    leftovers = list((folder / mode).glob(".iter_*"))
    return "in mid-save, newest kept" if leftovers else "between saves, newest kept"


def run(rounds: int, megabytes: float, seed: int, folder: Path) -> Counter[str]:
    """``rounds`` kills, dealt evenly to the five modes; how often the disk was in which state.

    Raises:
        AssertionError: a promise was broken.
    """
    rng, numel = random.Random(seed), int(megabytes * 250_000)
    (folder / "source").mkdir()
    tensors = {f"t{i}": torch.full((numel // TENSORS,), 7.0) for i in range(TENSORS)}
    save_file(tensors, folder / "source" / "model.safetensors")
    torch.set_num_threads(1)
    load_from_cache(folder, numel)  # and what else is imported on first use
    CheckpointManager(folder / "none").save(1, make_state(1, numel))
    seen: Counter[str] = Counter()
    modes = ("save", "async", "ranks", "convert", "cache")
    for number in range(rounds):
        mode = modes[number % len(modes)]
        delay = rng.uniform(0, 0.4)  # long enough to be in any phase of a save of this size
        seen[f"{mode}: {run_round(mode, folder, numel, delay, rng)}"] += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        start = time.perf_counter()
        seen = run(options.rounds, options.megabytes, options.seed, Path(folder))
    for state, count in sorted(seen.items()):
        print(f"{count:4d}  {state}")
    print(f"{options.rounds} kills in {time.perf_counter() - start:.0f} s: nothing complete was lost")


if __name__ == "__main__":
    main()
