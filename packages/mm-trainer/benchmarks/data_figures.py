"""Figures of the data layer: speed against bare decoding, memory, opening, resuming, balance, cache.

    OMP_NUM_THREADS=1 python packages/mm-trainer/benchmarks/data_figures.py [speed memory open resume balance cache]
    OMP_NUM_THREADS=1 WAN=<a tiny pipeline folder> CLIPS=<its clips> \\
        python packages/mm-trainer/benchmarks/data_figures.py training --config recipe:wan2_2/tiny_t2v

Needs a quiet machine with two cores and about 1 GB of disk in the temporary folder. Every figure prints what it is
measured against and its bound. ``training`` trains whatever configuration it is given, on CPU or accelerator; the
repository's demo makes the folders that the tiny recipe wants.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.batch import to_pixels
from mm_trainer.data.cache.dataset import CachedDataset
from mm_trainer.data.cache.writer import CacheOptions, write_cache
from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.data.metadata.formats import read_table
from mm_trainer.data.order import DataOrder, SampleTable
from mm_trainer.data.video.buckets import Bucket, cover
from mm_trainer.data.video.dataset import VideoDataset

FRAMES, HEIGHT, WIDTH, RATE = 49, 480, 832, 16
CONTEXT = DatasetContext(InputSpec(frame_stride=4, spatial_multiple=16), None, 0)


def main() -> None:
    figures = {f.__name__.removeprefix("measure_"): f for f in (measure_speed, measure_memory, measure_open)}
    figures |= {f.__name__.removeprefix("measure_"): f for f in (measure_resume, measure_balance, measure_cache)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[[], *figures, "training"], default=list(figures))
    parser.add_argument("--config", help="for the figure training: a configuration without data.cache")
    parser.add_argument("--steps", type=int, default=40, help="for the figure training: optimizer steps")
    arguments = parser.parse_args()
    figures["training"] = partial(measure_training, config=arguments.config, steps=arguments.steps)
    for name in arguments.figures:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{name}")
            figures[name](Path(folder))


def measure_speed(folder: Path) -> None:
    """Clips of the loader against PyAV alone, which decodes the same frames with as few steps as it can.

    The loader's part ends with the batch in the training process's memory, pixels as bytes; moving them to the device
    and making float32 of them there belongs to the step. Clips begin with a key frame, so nobody seeks. The bare side
    opens a clip and decodes up to the last needed frame with one thread, as a worker does, and of the needed frames
    (1) makes nothing, (2) makes RGB arrays in the clip's own size, as ``to_ndarray`` does, (3) makes RGB of the size
    and with the filter that the loader uses, in PyAV's fastest format, which is what the loader delivers.

    The rate is by the clock, so it wants an idle machine. CPU seconds are of all processes, start and end of the
    workers included, and mind less what else runs. Both are the best of five, since anything else only slows.
    """
    data = write_clips(folder, clips=4, rows=64, height=720, width=1280)
    crop = cover(Bucket(FRAMES, HEIGHT, WIDTH), height=720, width=1280)
    bare = {
        "(1) decoded": lambda frame: None,
        "(2) own size": lambda frame: frame.to_ndarray(format="rgb24"),
        "(3) to size": scale_bare(crop.height, crop.width),
    }
    clips: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for _ in range(5):  # in turns, so that what else the machine does hits all alike
        for name, use in bare.items():
            before = cpu_seconds()
            clips[name].append(rate(partial(decode_bare, folder, use), 4))
            cpu[name].append((cpu_seconds() - before) / 4)
        for workers in (1, 2):
            name = f"loader, {workers} workers"
            clips[name].append(loader_rate(data, workers=workers, count=8 * workers))
            before = cpu_seconds()
            read_once(data, workers=workers, count=16)
            cpu[name].append((cpu_seconds() - before) / 16)
    print(f"  {FRAMES} frames at {RATE} fps of 1280×720 H.264 at 30 fps, to {HEIGHT}×{WIDTH}; one decoder thread each")
    rates = {name: max(values) for name, values in clips.items()}
    costs = {name: min(values) for name, values in cpu.items()}
    for name in rates:
        print(f"  {name:18} {rates[name]:.2f} clips/s, {costs[name]:.3f} CPU seconds per clip")
    one, two = "loader, 1 workers", "loader, 2 workers"
    for name in bare:
        by_clock, by_cpu = rates[one] / rates[name], costs[name] / costs[one]
        print(f"  one worker over bare {name}: {by_clock:.2f} by the clock, {by_cpu:.2f} by CPU time (at least 0.9)")
    print(f"  two workers over one: {rates[two] / rates[one]:.2f} by the clock (at least 1.7)")


def decode_bare(folder: Path, use: Callable[[av.VideoFrame], object]) -> None:
    """The needed frames of every clip by PyAV alone."""
    wanted = {round(k / RATE * 30) for k in range(FRAMES)}
    for number in range(4):
        with av.open(str(folder / f"{number}.mp4")) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    use(frame)
                if index == max(wanted):
                    break


def scale_bare(height: int, width: int) -> Callable[[av.VideoFrame], object]:
    reformatter = av.video.reformatter.VideoReformatter()
    return lambda frame: reformatter.reformat(frame, width, height, "gbrp", interpolation="BICUBIC", threads=1)


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def read_once(data: VideoDataset, *, workers: int, count: int) -> None:
    """So many clips through the loader and no more: a training loader would read ahead."""
    options = WorkerOptions(num_workers=workers)
    for _ in fixed_batches(data, quantiles=[0.5], micro_batch_size=1, max_samples=count, workers=options):
        pass


def loader_rate(data: VideoDataset, *, workers: int, count: int) -> float:
    """Clips per second once the workers run."""
    loader = BatchLoader(data, micro_batch_size=1, workers=WorkerOptions(num_workers=workers))
    batches = iter(loader)
    for _ in range(2 * workers + 2):
        next(batches)
    return rate(lambda: list(islice(batches, count)), count)


def measure_memory(folder: Path) -> None:
    """Resident memory after 200 and 2,000 samples, of the readers, with 200,000 rows of metadata."""
    data = Weighed(write_clips(folder, clips=3, rows=200_000, height=48, width=64, frames=6, bucket=(5, 48, 64)))
    for workers in (0, 2):
        loader = BatchLoader(data, micro_batch_size=4, workers=WorkerOptions(num_workers=workers))
        rss = [batch["rss"].max().item() for batch in islice(loader, 500)]
        early, late = max(rss[:50]), max(rss[-50:])
        print(f"  {workers} workers: {early:.0f} MB after 200, {late:.0f} MB after 2,000 samples (+50 at most)")


class Weighed:
    """Adds the resident memory of the process that reads, in MB."""

    def __init__(self, dataset: VideoDataset) -> None:
        self.dataset = dataset
        self.bucket, self.tokens = dataset.bucket, dataset.tokens

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        return self.dataset.load(index, sample_key) | {"rss": resident()}


def measure_open(folder: Path) -> None:
    """Opening a million rows, and what a worker's own memory is then (shared pages not counted)."""
    path = folder / "metadata.csv"
    with path.open("w") as file:
        file.write("video,caption,width,height,num_frames,fps\n")
        for row in range(1_000_000):
            size = f"1280,720,{120 + row % 60},24"
            file.write(f'clips/{row // 1000}/{row}.mp4,"clip number {row}, of a thing that moves",{size}\n')
    started, cpu, before = time.perf_counter(), cpu_seconds(), resident()
    table = read_table(path)
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    print(f"  {path.stat().st_size / 1e6:.0f} MB, {len(table):,} rows: {wall:.2f} s (at most 3), {cpu:.2f} s of CPU")
    started = time.perf_counter()
    data = VideoDataset({"data_path": path, "buckets": [[FRAMES, HEIGHT, WIDTH]]}, CONTEXT)
    print(f"  as a data set with buckets: {time.perf_counter() - started:.2f} s, {resident() - before:.0f} MB")
    started = time.perf_counter()
    loader = BatchLoader(Private(data), micro_batch_size=1, workers=WorkerOptions(num_workers=2))
    batches = list(islice(loader, 200))
    print(f"  loader and 200 rows touched by two workers: {time.perf_counter() - started:.2f} s")
    print(f"  a worker's own memory: {max(batch['private'].item() for batch in batches):.0f} MB")


class Private:
    """Reads rows, not files, and says what memory is the process's own, in MB."""

    def __init__(self, dataset: VideoDataset) -> None:
        self.dataset = dataset
        self.bucket, self.tokens = dataset.bucket, dataset.tokens

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        row = int(self.dataset.clips.row[index])
        self.dataset.table.media(row), self.dataset.table.captions(row)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
        return {"private": private / 1e3}


def measure_resume(folder: Path) -> None:
    """Time to the first batch at step 0 and at step 1,000,000."""
    data = write_clips(folder, clips=4, rows=1000)
    times: dict[int, list[float]] = {0: [], 1_000_000: []}
    for _ in range(5):
        for step, taken in times.items():
            loader = BatchLoader(data, micro_batch_size=1)
            loader.seek(step)
            started = time.perf_counter()
            next(iter(loader))
            taken.append(time.perf_counter() - started)
    first, late = (statistics.median(taken) for taken in times.values())
    print(f"  first batch at step 0: {first * 1e3:.1f} ms; at step 1,000,000: {late * 1e3:.1f} ms")
    print(f"  {late / first:.2f} × (at most 1.2)")


def measure_balance(folder: Path) -> None:
    """Waiting of ranks for one another on three aspects × three lengths, against dealing in shuffled order."""
    generator = np.random.default_rng(0)
    shapes = [(frames, *sides) for frames in (17, 49, 81) for sides in ((480, 832), (832, 480), (624, 624))]
    spec = InputSpec(frame_stride=4, spatial_multiple=16)
    chosen = [shapes[i] for i in generator.choice(len(shapes), size=20_000)]
    table = SampleTable.build(chosen, [spec.tokens(*shape) for shape in chosen])
    for ranks, accumulation in ((2, 1), (8, 1), (8, 4), (64, 1)):
        order = DataOrder(table, micro_batch_size=2, group=ranks * accumulation, seed=0)
        balanced = statistics.mean(order.epoch(epoch).imbalance(ranks) for epoch in range(3))
        naive = table.tokens[generator.permutation(len(table))]
        rounds = naive[: len(naive) // (2 * ranks) * 2 * ranks].reshape(-1, ranks, 2).sum(2)
        waiting = rounds.max(1).sum() / rounds.mean(1).sum() - 1
        print(
            f"  {ranks} ranks × {accumulation}: {balanced:.1%} waiting (at most 10 %), dealt as shuffled: {waiting:.1%}"
        )


def measure_cache(folder: Path) -> None:
    """Samples per second from the cache, against clips, without the encoders' time."""
    data = write_clips(folder, clips=4, rows=32)

    def encode(batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"latents": torch.nn.functional.avg_pool3d(to_pixels(batch["video"]), (4, 8, 8))}

    write_cache(folder / "cache", data, encode, settings={}, options=CacheOptions(micro_batch_size=1))
    clips = loader_rate(data, workers=1, count=16)
    cached = BatchLoader(CachedDataset(folder / "cache"), micro_batch_size=1, workers=WorkerOptions(num_workers=1))
    batches = iter(cached)
    next(batches)
    ready = rate(lambda: list(islice(batches, 200)), 200)
    print(f"  from clips {clips:.1f}, from the cache {ready:.0f} samples/s, one worker")


def measure_training(folder: Path, *, config: str, steps: int) -> None:
    """Seconds per step of training from the cache and from clips, and how far the losses are from one another."""
    script = Path(sys.executable).parent / "mm-trainer"

    def run(command: str, *settings: str) -> float:
        started = time.perf_counter()
        subprocess.run([script, command, config, *common, *settings], check=True, capture_output=True)
        return time.perf_counter() - started

    common = [f"training.train_iters={steps}", f"training.save_interval={steps}", "training.val_interval=0"]
    common += ["training.lr_warmup_iters=0", "training.log_interval=1"]
    cache = f"data.cache={folder / 'cache'}"
    writing = run("cache", cache)
    steady: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name, settings in {"clips": [], "cache": [cache]}.items():
        run("train", f"training.save={folder / name}", *settings)
        lines = (folder / name / "logs" / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        losses[name] = [record["loss"] for record in records]
        steady[name] = statistics.median(record["step_time_s"] for record in records[5:])
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["cache"], losses["clips"], strict=True))
    live, cached = steady["clips"], steady["cache"]
    print(f"  a step from clips {live:.3f} s, from the cache {cached:.3f} s (median of {steps - 5})")
    print(f"  {live / cached:.2f} × as fast from the cache, which took {writing:.1f} s to write")
    print(f"  losses of {steps} steps differ by {apart:.1e} at most")


def rate(action: Callable[[], object], count: int) -> float:
    """Things per second."""
    started = time.perf_counter()
    action()
    return count / (time.perf_counter() - started)


def resident() -> float:
    """This process's resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def write_clips(
    folder: Path,
    *,
    clips: int,
    rows: int,
    height: int = 360,
    width: int = 640,
    frames: int = 110,
    bucket: Sequence[int] = (FRAMES, HEIGHT, WIDTH),
) -> VideoDataset:
    """Clips of drifting texture at 30 fps, and many rows of metadata on them."""
    generator = np.random.default_rng(0)
    texture = generator.integers(0, 255, (height // 8 + frames, width // 8 + frames, 3), dtype=np.uint8)
    texture = np.kron(texture, np.ones((8, 8, 1), dtype=np.uint8))
    for number in range(clips):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=30)
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            for shift in range(frames):
                image = np.ascontiguousarray(texture[2 * shift : 2 * shift + height, 3 * shift : 3 * shift + width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())
    lines = [f"{row % clips}.mp4,clip {row},{width},{height},{frames},30" for row in range(rows)]
    (folder / "metadata.csv").write_text("\n".join(["video,caption,width,height,num_frames,fps", *lines]))
    config = {"data_path": folder / "metadata.csv", "buckets": [list(bucket)], "fps": RATE}
    if frames < FRAMES:
        config["fps"] = 30
    return VideoDataset(config, CONTEXT)


if __name__ == "__main__":
    main()
