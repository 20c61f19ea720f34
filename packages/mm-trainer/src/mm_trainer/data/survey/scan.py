"""Looking through a whole data set before a run: what is usable, what a step will cost, what the model will see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.loader import WorkerOptions, make_torch_loader, sample_table
from mm_trainer.data.order import DataOrder
from mm_trainer.data.report import CountsSlowReads, DataReport, Naming, copy_report
from mm_trainer.errors import BadSample

if TYPE_CHECKING:
    from rich.table import Table

SHEET_FRAMES = 4
"""Frames that the contact sheet shows of a clip."""


@dataclass(frozen=True)
class Glimpse:
    """One sample, small enough to travel from a worker by the thousand."""

    index: int
    bad: tuple[str, str] | None
    """(where, reason) if it can't be used."""
    text_full: bool = False
    """Its prompt fills all positions that the text encoder takes, so the rest, if there is any, is cut."""
    caption: str = ""
    name: str = ""
    """The file, as the metadata has it, where the data set knows names."""
    slow: bool = False
    """Its times can't be trusted, so it was decoded from the start."""
    frames: NDArray[np.uint8] | None = None
    """(F, H, W, 3): some frames, if it was chosen for the contact sheet."""


@dataclass(frozen=True)
class BucketCount:
    """One bucket of the data set."""

    bucket: str
    samples: int
    tokens: int
    """Of one sample, on average."""


@dataclass(frozen=True)
class ScanResult:
    """What `scan` found."""

    report: DataReport
    """Rows, and those that were left out, at opening or because they can't be read."""
    buckets: tuple[BucketCount, ...]
    """Of the readable samples, the largest first."""
    step_tokens: tuple[int, int, int]
    """Tokens of an optimizer step over all ranks: least, mean, most."""
    steps_per_epoch: int
    repeats: int
    """Samples of an epoch that come twice, to fill up batches."""
    imbalance: float
    """Share of the time that ranks wait for one another; see `EpochOrder.imbalance`."""
    full_texts: int
    """Prompts that fill the text encoder's positions and may be cut."""
    slow: int
    """Samples that had to be decoded from the start of their file."""
    glimpses: tuple[Glimpse, ...]
    """Those chosen for the contact sheet."""


class _Glimpser:
    """Reads one sample inside a worker and keeps what the report needs."""

    def __init__(self, dataset: MapDataset, shown: frozenset[int]) -> None:
        self.dataset, self.shown = dataset, shown

    def __getitem__(self, index: int) -> Glimpse:
        before = self._slow_reads()
        try:
            sample = self.dataset.load(index, index)
        except BadSample as error:
            return Glimpse(index, (error.where, error.reason))
        mask = sample.get("prompt_mask")
        return Glimpse(
            index,
            None,
            text_full=isinstance(mask, Tensor) and bool(mask.all()),
            caption=str(sample.get("caption", "")),
            name=self.dataset.name(index) if isinstance(self.dataset, Naming) else "",
            slow=self._slow_reads() > before,
            frames=_thumbnails(sample) if index in self.shown else None,
        )

    def _slow_reads(self) -> int:
        return self.dataset.slow_reads if isinstance(self.dataset, CountsSlowReads) else 0


def scan(
    dataset: MapDataset,
    *,
    micro_batch_size: int,
    data_size: int = 1,
    accumulation: int = 1,
    seed: int = 0,
    workers: WorkerOptions | None = None,
    sheet_samples: int = 24,
    progress: Callable[[int, int], None] | None = None,
) -> ScanResult:
    """Read every sample once.

    Args:
        dataset: what is looked through.
        micro_batch_size: as in training, like ``data_size``, ``accumulation`` and ``seed``: they say what a step holds.
        workers: processes that read.
        sheet_samples: samples for the contact sheet, spread over the buckets.
        progress: called with (samples read, samples in all).
    """
    table = sample_table(dataset)
    report = copy_report(dataset)
    shown = _choose_shown(table.bucket, sheet_samples)
    glimpses, usable, full_texts, slow, listed = [], [], 0, 0, set()
    for done, glimpse in enumerate(_glimpse_all(dataset, shown, workers or WorkerOptions()), start=1):
        if glimpse.bad is not None:
            if glimpse.bad not in listed:  # a mix reads a sample as often as it repeats it
                report.skip(*glimpse.bad, bad=True)
            listed.add(glimpse.bad)
        else:
            usable.append(glimpse.index)
            full_texts += glimpse.text_full
            slow += glimpse.slow
        if glimpse.frames is not None:
            glimpses.append(glimpse)
        if progress is not None:
            progress(done, len(table))
    rows = np.array(usable, dtype=np.int64)
    buckets, tokens = Counter[Any](), Counter[Any]()
    for index in usable:
        buckets[dataset.bucket(index)] += 1
        tokens[dataset.bucket(index)] += dataset.tokens(index)
    counts = [
        BucketCount(_name(bucket), count, round(tokens[bucket] / count)) for bucket, count in buckets.most_common()
    ]
    if not usable:
        return ScanResult(report, (), (0, 0, 0), 0, 0, 0.0, 0, 0, tuple(glimpses))
    order = DataOrder(table.take(rows), micro_batch_size=micro_batch_size, group=data_size * accumulation, seed=seed)
    epoch = order.epoch(0)
    per_step = epoch.cost.sum(1)
    return ScanResult(
        report=report,
        buckets=tuple(counts),
        step_tokens=(int(per_step.min()), round(float(per_step.mean())), int(per_step.max())),
        steps_per_epoch=order.steps_per_epoch,
        repeats=epoch.repeats,
        imbalance=epoch.imbalance(data_size),
        full_texts=full_texts,
        slow=slow,
        glimpses=tuple(glimpses),
    )


def scan_tables(result: ScanResult) -> list[Table]:
    """The report as tables for a terminal: rows, buckets, steps."""
    from rich.markup import escape
    from rich.table import Table

    rows = Table("rows", "count", "which", title="Data set")
    rows.add_row("usable", f"{result.report.usable:,} of {result.report.rows:,}", "")
    for entry in result.report.skipped.values():
        kind = "bad" if entry.bad else "left out"
        more = f"\nand {entry.count - len(entry.examples)} more" if entry.count > len(entry.examples) else ""
        rows.add_row(escape(f"{kind}: {entry.reason}"), f"{entry.count:,}", escape("\n".join(entry.examples) + more))
    if result.full_texts:
        rows.add_row("captions that fill the text encoder", f"{result.full_texts:,}", "what is longer is cut")
    if result.slow:
        rows.add_row("decoded from the start", f"{result.slow:,}", "their times can't be trusted; slower, and right")
    buckets = Table("bucket", "samples", "share", "tokens", title="Buckets")
    total = sum(bucket.samples for bucket in result.buckets)
    for bucket in result.buckets:
        share = f"{'█' * round(20 * bucket.samples / total)} {bucket.samples / total:.1%}"
        buckets.add_row(escape(bucket.bucket), f"{bucket.samples:,}", share, f"{bucket.tokens:,}")
    steps = Table("steps per epoch", "repeats", "tokens per step (least, mean, most)", "waiting", title="Steps")
    least, mean, most = result.step_tokens
    steps.add_row(
        f"{result.steps_per_epoch:,}",
        f"{result.repeats:,}",
        f"{least:,}  {mean:,}  {most:,}",
        f"{result.imbalance:.1%}",
    )
    return [rows, buckets, steps]


def _glimpse_all(dataset: MapDataset, shown: frozenset[int], workers: WorkerOptions) -> Iterator[Glimpse]:
    batches = [[index] for index in range(len(dataset))]
    loader: DataLoader[Any] = make_torch_loader(_Glimpser(dataset, shown), batches, workers, collate=_first)
    yield from loader


def _first(glimpses: Sequence[Glimpse]) -> Glimpse:
    return glimpses[0]


def _choose_shown(bucket: NDArray[np.int64], count: int) -> frozenset[int]:
    """Samples for the contact sheet: of every bucket in turn, spread over its members."""
    members = [np.flatnonzero(bucket == number) for number in range(int(bucket.max()) + 1)]
    share = max(1, count // len(members))
    picked = [own[np.unique(np.linspace(0, len(own) - 1, min(share, len(own))).astype(int))] for own in members]
    return frozenset(int(index) for own in picked[:count] for index in own)


def _thumbnails(sample: Mapping[str, Any]) -> NDArray[np.uint8] | None:
    """Some frames of ``video`` (3, F, H, W), evenly spread, as (F, H, W, 3)."""
    video = sample.get("video")
    if not isinstance(video, Tensor) or video.dim() != 4 or video.shape[0] != 3:
        return None
    chosen = np.unique(np.linspace(0, video.shape[1] - 1, SHEET_FRAMES).round().astype(int))
    frames = video[:, chosen].permute(1, 2, 3, 0)
    if frames.dtype != torch.uint8:  # in [−1, 1]
        frames = ((frames + 1) * 127.5 + 0.5).clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(frames.numpy())


def _name(bucket: object) -> str:
    return "×".join(map(str, bucket)) if isinstance(bucket, tuple) else str(bucket)
