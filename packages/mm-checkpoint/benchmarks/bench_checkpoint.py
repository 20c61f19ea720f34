"""Speed, memory and bytes read of conversion, loading and saving, against a plain file copy in the same run.

    python benchmarks/bench_checkpoint.py [--gigabytes 3] [--repeat 3] [--folder DIR] [--only convert,load,save,cli]

Every measurement runs in a process of its own. "Anonymous" is the peak of RssAnon above what it was after the imports;
"read" are the slices that the reader asks for. All that is written is flushed to the disk before the clock stops.
Times are the median of the repetitions, which are interleaved, so that a ratio compares like with like.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import xxhash

LAYERS = 40
RANKS = 4
MB = 1e6


# --- inside a measured process ------------------------------------------------------------------------------------


def anonymous() -> int:
    """This process's anonymous memory in bytes."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Time a block and watch its anonymous memory."""
    result, stop = {"seconds": 0.0, "processor": 0.0, "anonymous": 0.0}, Event()
    base = anonymous()

    def watch() -> None:
        while not stop.wait(0.004):
            result["anonymous"] = max(result["anonymous"], anonymous() - base)

    watcher = Thread(target=watch)
    watcher.start()
    start, processor = time.perf_counter(), time.process_time()
    try:
        yield result
    finally:
        result["seconds"], result["processor"] = time.perf_counter() - start, time.process_time() - processor
        stop.set()
        watcher.join()


def layer_width(gigabytes: float) -> int:
    """The least width, in steps of 64, at which 40 layers of 12 width² fp32 elements come to so many bytes."""
    return math.ceil((gigabytes * 1e9 / 4 / LAYERS / 12) ** 0.5 / 64) * 64


def make_model(width: int) -> Any:
    """40 layers shaped like a transformer's, on meta."""
    import torch
    from torch import nn

    class Layer(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # fully_shard asks for one
            return x

    def layer() -> nn.Module:
        parts = {name: nn.Linear(width, width) for name in "qkvo"}
        parts |= {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width), "norm": nn.LayerNorm(width)}
        return Layer(parts)

    with torch.device("meta"):
        return Layer({"blocks": nn.ModuleList(layer() for _ in range(LAYERS))})


def make_source(folder: Path, width: int) -> None:
    """Write the synthetic checkpoint in diffusers form, about 1 GB per file."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in make_model(width).state_dict().items()}
    per_file = LAYERS // 4
    weight_map = {}
    for number in range(4):
        names = [name for name in shapes if int(name.split(".")[1]) // per_file == number]
        file = f"diffusion_pytorch_model-{number + 1:05d}-of-00004.safetensors"
        tensors = {name: torch.randn(shapes[name], generator=generator) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"_class_name": "Synthetic"}')


def copy(source: Path, target: Path) -> dict[str, float]:
    """What the conversions are compared with: copy every file in the kernel, flush every file, then the folder.

    It hashes nothing. Its source is in the page cache, if that is large enough, as is a conversion's.
    """
    with measured() as result:
        target.mkdir()
        for path in source.iterdir():
            shutil.copyfile(path, target / path.name)
            flush(target / path.name)
        flush(target)
    return result


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def convert(source: Path, target: Path, *, to: str, **options: Any) -> dict[str, float]:
    import torch.distributed.checkpoint

    from mm_checkpoint import convert as run

    torch.set_num_threads(1)
    with measured() as result:
        run(source, target, to=to, **{"max_shard_size": "1GB", **options})
    return result


def build_load_save(source: Path, target: Path, *, width: int) -> dict[str, float]:
    """The way around: build the model, load the files into it, save it with torch."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    with measured() as result:
        model = make_model(width).to_empty(device="cpu")
        for path in sorted(source.glob("*.safetensors")):
            model.load_state_dict(load_file(path), strict=False)
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    return result


def hash_speeds() -> dict[str, float]:
    """GB/s of what Python brings, and of xxhash."""
    data = os.urandom(64 << 20)
    candidates: dict[str, Callable[[bytes], Any]] = {"xxh3_64": xxhash.xxh3_64, "crc32": zlib.crc32}
    candidates |= {name: getattr(hashlib, name) for name in ("sha256", "sha1", "blake2b")}
    fastest = {name: min(timeit.repeat(lambda f=f: f(data), number=1, repeat=3)) for name, f in candidates.items()}
    return {name: len(data) / seconds / 1e9 for name, seconds in fastest.items()}


def on_ranks(work: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``work(rank, ...)`` on forked gloo ranks, the imports shared; lists of what each returned."""
    import torch
    import torch._dynamo  # DTensor imports it on first use
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(work, rank, f"file://{folder}/store", args, kwargs) for rank in range(RANKS)]
        with context.Pool(RANKS) as pool:
            results = pool.map(_rank, jobs, chunksize=1)
    return {key: [result[key] for result in results] for key in results[0]}


def _rank(job: Any) -> dict[str, Any]:
    import torch.distributed as dist

    work, rank, store, args, kwargs = job
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    try:
        return work(*args, **kwargs)
    finally:
        dist.destroy_process_group()


def sharded_model(width: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(width), init_device_mesh("cpu", (RANKS,))
    for block in model["blocks"]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def load_sharded(source: Path, *, width: int) -> dict[str, float]:
    import torch.distributed as dist

    from mm_checkpoint import load_weights

    model = sharded_model(width)
    dist.barrier()
    with measured() as result:
        model.to_empty(device="cpu")
        report = load_weights(model, source)
        dist.barrier()
    return {**result, "read": report.bytes_read}


def save_sharded(folder: Path, *, width: int, source: Path, asynchronous: bool, turns: int) -> dict[str, list[float]]:
    """Several saves after `prepare`, which makes the buffers of the first; what each took, and blocked."""
    import torch.distributed as dist

    from mm_checkpoint import CheckpointManager, load_weights

    model = sharded_model(width).to_empty(device="cpu")
    load_weights(model, source)
    state = {"model": model.state_dict()}
    manager = CheckpointManager(folder, async_save=asynchronous, keep_last=1)
    manager.prepare(0, state)
    result: dict[str, list[float]] = {"seconds": [], "blocked": [], "anonymous": []}
    for turn in range(turns):
        dist.barrier()
        with measured() as whole:
            start = time.perf_counter()
            manager.save(turn + 1, state)
            result["blocked"].append(time.perf_counter() - start)
            manager.wait()
            dist.barrier()
        result["seconds"].append(whole["seconds"])
        result["anonymous"].append(whole["anonymous"])
    manager.close()
    return result


def save_alone(folder: Path, *, source: Path, width: int, checksums: bool) -> dict[str, float]:
    from mm_checkpoint import CheckpointManager, load_weights

    model = make_model(width).to_empty(device="cpu")
    load_weights(model, source)
    manager = CheckpointManager(folder, checksums=checksums)
    with measured() as result:
        manager.save(1, {"model": model.state_dict()})
    return result


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "copy": copy,
    "convert": convert,
    "build_load_save": build_load_save,
    "hash_speeds": hash_speeds,
    "load_sharded": lambda source, **kw: on_ranks(load_sharded, source, **kw),
    "save_sharded": lambda folder, **kw: on_ranks(save_sharded, folder, **kw),
    "save_alone": save_alone,
    "make_source": make_source,
}


# --- outside ------------------------------------------------------------------------------------------------------


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


class Bench:
    """Runs measurements in fresh processes and prints what came out."""

    def __init__(self, folder: Path, gigabytes: float, repeat: int) -> None:
        self.folder, self.repeat, self.width = folder, repeat, layer_width(gigabytes)
        self.source = folder / "source"
        self.run("make_source", self.source, self.width)
        self.size = sum(path.stat().st_size for path in self.source.iterdir())
        print(f"{LAYERS} layers of width {self.width}: {self.size / 1e9:.2f} GB, {os.cpu_count()} cores, ", end="")
        print(f"load average {os.getloadavg()[0]:.1f}")

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        os.sync()
        call = json.dumps([name, [str(a) if isinstance(a, Path) else a for a in args], kwargs], default=str)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--call", call]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    def conversions(self) -> None:
        dcp = self.folder / "dcp"
        there = partial(self.run, "convert", self.source, to="dcp")
        back = partial(self.run, "convert", dcp, to="diffusers")
        cases: dict[str, Callable[[Path], Any]] = {
            "copy, flushed": partial(self.run, "copy", self.source),
            "diffusers -> dcp": there,
            "diffusers -> dcp, 2 workers": partial(there, workers=2),
            "diffusers -> dcp, bf16": partial(there, dtype="bf16"),
            "dcp -> diffusers": back,
            "dcp -> diffusers, one file": partial(back, max_shard_size="1000GB"),
            "dcp -> diffusers, 2 workers": partial(back, workers=2),
            "dcp -> diffusers, bf16": partial(back, dtype="bf16"),
            "build, load, dcp.save": partial(self.run, "build_load_save", self.source, width=self.width),
        }
        there(dcp)
        runs: dict[str, list[Any]] = {name: [] for name in cases}
        for _ in range(self.repeat):
            for name, measure in cases.items():
                runs[name].append(measure(self.folder / "out"))
                shutil.rmtree(self.folder / "out")
        reference = median(runs["copy, flushed"], "seconds")
        print(f"\n{'conversion':32s} {'seconds':>8s} {'x copy':>7s} {'processor s':>12s} {'anonymous MB':>13s}")
        for name, found in runs.items():
            seconds = median(found, "seconds")
            processor, peak = median(found, "processor"), median(found, "anonymous") / MB
            print(f"{name:32s} {seconds:8.2f} {reference / seconds:7.2f} {processor:12.2f} {peak:13.0f}")

    def loads(self) -> None:
        if not (self.folder / "dcp").exists():
            self.run("convert", self.source, self.folder / "dcp", to="dcp")
        print(f"\n{f'load on {RANKS} FSDP2 ranks':32s} {'seconds':>8s} {'read, max':>10s} {'read, sum':>10s} ", end="")
        print("anonymous, sum (all x the model)")
        for name, source in (("diffusers", self.source), ("dcp, converted by one process", self.folder / "dcp")):
            found = self.run("load_sharded", source, width=self.width)
            read, peak = found["read"], found["anonymous"]
            print(f"{name:32s} {max(found['seconds']):8.2f} {max(read) / self.size:10.3f} ", end="")
            print(f"{sum(read) / self.size:10.3f} {sum(peak) / self.size:10.2f}")

    def saves(self) -> None:
        shard = self.size / RANKS
        print(f"\n{f'save on {RANKS} ranks':32s} {'seconds':>8s} {'blocked':>8s} anonymous MB per rank, max ", end="")
        print(f"(a shard is {shard / MB:.0f})")
        found = {}
        for name, asynchronous in (("synchronous", False), ("async", True)):
            arguments = {"width": self.width, "source": self.source, "asynchronous": asynchronous, "turns": self.repeat}
            ranks = self.run("save_sharded", self.folder / name, **arguments)
            shutil.rmtree(self.folder / name)
            # A save takes as long as its slowest rank; the median is over the turns.
            row = {key: statistics.median(map(max, zip(*values, strict=True))) for key, values in ranks.items()}
            print(f"{name:32s} {row['seconds']:8.2f} {row['blocked']:8.2f} {row['anonymous'] / MB:8.0f}")
            found[name] = row["blocked"]
        print(f"  async blocks for {100 * found['async'] / found['synchronous']:.0f} % of a synchronous save")
        runs: dict[bool, list[Any]] = {True: [], False: []}
        for _ in range(self.repeat):
            for checksums in runs:
                out = self.folder / "run"
                runs[checksums].append(
                    self.run("save_alone", out, source=self.source, width=self.width, checksums=checksums)
                )
                shutil.rmtree(out)
        with_sums, without = (median(runs[key], "seconds") for key in (True, False))
        print(f"one process, with checksums {with_sums:.2f} s, without {without:.2f} s")
        speeds = self.run("hash_speeds")
        print("hashes, GB/s: " + ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items()))

    def commands(self) -> None:
        command = [sys.executable, "-c", "from mm_checkpoint.cli import main; main()"]
        print()
        for name, arguments in (("--help", ["--help"]), ("inspect", ["inspect", str(self.source)])):
            times = []
            for _ in range(self.repeat):
                start = time.perf_counter()
                subprocess.run([*command, *arguments], stdout=subprocess.DEVNULL, check=True)
                times.append(time.perf_counter() - start)
            print(f"mm-checkpoint {name:18s} {statistics.median(times):8.2f} s")


def call(text: str) -> None:
    name, args, kwargs = json.loads(text)
    args = [Path(a) if isinstance(a, str) else a for a in args]
    kwargs = {key: Path(value) if key in ("source", "folder") else value for key, value in kwargs.items()}
    print(json.dumps(MEASUREMENTS[name](*args, **kwargs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; about five times the size is needed")
    parser.add_argument("--only", default="convert,load,save,cli")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        call(options.call)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder), options.gigabytes, options.repeat)
        parts = {"convert": bench.conversions, "load": bench.loads, "save": bench.saves, "cli": bench.commands}
        for name in options.only.split(","):
            parts[name]()


if __name__ == "__main__":
    main()
