"""`BatchLoader`: this rank's micro-batches, endlessly, from any position; `fixed_batches` for validation."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.bad_samples import BadSampleLog, OnBadSample, SampleReader, join
from mm_trainer.data.identity import names_digest
from mm_trainer.data.order import DataOrder, SampleTable
from mm_trainer.data.report import Naming, Reporting
from mm_trainer.errors import DataError

logger = logging.getLogger(__name__)

Places = list[tuple[int, int]]
"""A micro-batch before it is read: (sample number, sample key) of each sample."""


class Reader(Protocol):
    """What reads a place inside a worker."""

    def __getitem__(self, place: Any, /) -> Any: ...


@dataclass(frozen=True)
class WorkerOptions:
    """How samples are read ahead: ``data.dataloader_param`` without ``shuffle``."""

    num_workers: int = 0
    """Processes of this rank that read; 0 reads in the training process."""
    prefetch_factor: int = 2
    """Micro-batches that each worker reads ahead."""
    pin_memory: bool = False


class BatchLoader:
    """Yields this rank's micro-batches epoch after epoch; see [Note: global data order] in `mm_trainer.data.order`.

    A batch holds the collated samples and ``sample_key`` (B,) int64, all on the CPU; pixels are uint8, see
    [Note: pixels] in `mm_trainer.data.batch`. The position counts optimizer steps over all epochs, so it means the
    same on any number of ranks; moving there computes one epoch's order and reads nothing.

    Args:
        dataset: the samples.
        micro_batch_size: samples per batch.
        data_rank: this rank's place among the data ranks (peers of a context-parallel group share it).
        data_size: number of data ranks.
        accumulation: micro-batches of a rank per optimizer step.
        seed: the run's seed.
        shuffle: a new order every epoch; False: always the data set's.
        workers: reading ahead.
        on_bad_sample: ``replace`` or ``error``.
        max_bad_fraction: share of bad samples that is tolerated; see `BadSampleLog.share`.

    Raises:
        DataError: the data set is empty, or too much of it is bad.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        micro_batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        workers: WorkerOptions | None = None,
        on_bad_sample: OnBadSample = "replace",
        max_bad_fraction: float = 0.05,
    ) -> None:
        if len(dataset) == 0:
            raise DataError("the data set is empty")
        self.micro_batch_size, self.accumulation = micro_batch_size, accumulation
        self.data_rank, self.data_size = data_rank, data_size
        self.workers = workers or WorkerOptions()
        table = sample_table(dataset)
        self.order = DataOrder(
            table, micro_batch_size=micro_batch_size, group=data_size * accumulation, seed=seed, shuffle=shuffle
        )
        self._reader = SampleReader(dataset, table, seed=seed, replace=on_bad_sample == "replace")
        self.bad = _open_bad_log(dataset, data_size, on_bad_sample, max_bad_fraction)
        repeats = self.order.samples_per_epoch - len(table)
        if repeats:
            logger.info(
                "%d of %d samples of an epoch are repeats, to fill up batches", repeats, self.order.samples_per_epoch
            )
        self._names = names_digest(dataset)
        self._yielded = 0
        """Micro-batches of this rank since the start of the run."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch, equal on all ranks."""
        return self.order.steps_per_epoch

    @property
    def step(self) -> int:
        """Optimizer steps whose batches were all handed out, over all epochs."""
        return self._yielded // self.accumulation

    def seek(self, step: int) -> None:
        """Continue with the first batch of an optimizer step; takes effect at the next ``iter()``."""
        self._yielded = step * self.accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Endless; starts at the current position. Workers start here and end with the iterator."""
        loader: DataLoader[Any] = make_torch_loader(
            self._reader, _RankSampler(self.order, self._yielded, self), self.workers
        )
        for loaded in loader:
            batch = self.bad.check(loaded)
            # Before the yield: a checkpoint taken while the batch is in use must count it.
            self._yielded += 1
            yield batch

    def describe(self, sample_key: int) -> str:
        """Which sample stands at this position of the global data order, in words."""
        layout = self.order.epoch(sample_key // self.order.samples_per_epoch)
        index = int(layout.index[layout.key == sample_key][0])
        dataset = self._reader.dataset
        name = f" ({dataset.name(index)})" if isinstance(dataset, Naming) else ""
        return f"sample {index}{name}, position {sample_key} of the global data order"

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """The position, for a checkpoint.

        Args:
            step: optimizer steps done, from a caller that takes batches ahead of using them; default: those handed out.
        """
        return {
            "step": self.step if step is None else step,
            "samples_per_step": self.order.samples_per_step,
            "micro_batch_size": self.micro_batch_size,
            "names_digest": self._names,
            "num_samples": len(self.order.samples),
            "samples_digest": self.order.samples.digest,
            "seed": self.order.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on any number of ranks.

        Raises:
            DataError: an entry is missing, or the saved run had other data, another seed or another global batch.
        """
        ours, state = self.state_dict(), {"names_digest": None, **state}
        if self.order.samples.bucket.max() == 0:  # one bucket: the micro-batch size doesn't change the order
            state = {**state, "micro_batch_size": self.micro_batch_size}
        if None not in (state["names_digest"], self._names) and state["names_digest"] != self._names:
            logger.warning("samples were renamed, replaced or moved since the checkpoint: the order is by their places")
        missing = sorted(set(ours) - set(state))
        if missing:
            raise DataError(f"the checkpoint lacks the data position: no {', '.join(missing)}")
        samples, batch, micro = "num_samples", "samples_per_step", "micro_batch_size"
        reasons = {
            f"the data set has changed ({state[samples]} samples then, {ours[samples]} now)": (
                samples,
                "samples_digest",
            ),
            f"the global batch was {state[batch]}, is {ours[batch]} (training.global_batch_size={state[batch]} with "
            "training.gradient_accumulation_steps=auto keeps it)": (batch,),
            f"micro_batch_size was {state[micro]}, is {ours[micro]}, which orders several buckets differently": (
                micro,
            ),
            f"the seed was {state['seed']}, is {ours['seed']}": ("seed",),
        }
        broken = [reason for reason, names in reasons.items() if any(state[name] != ours[name] for name in names)]
        if broken:
            raise DataError(f"can't continue the data order: {'; '.join(broken)} (training.init_from starts anew)")
        self.seek(int(state["step"]))


def fixed_batches(
    dataset: MapDataset,
    *,
    quantiles: Sequence[float],
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    max_samples: int | None = None,
    workers: WorkerOptions | None = None,
) -> Iterator[dict[str, Any]]:
    """Every sample at every quantile once, the same each time: what a validation loss is measured on.

    Args:
        dataset: the samples, used in their own order.
        quantiles: fixed quantiles of the noise level, each in [0, 1); none: every sample once, without a quantile.
        micro_batch_size: samples per batch; smaller buckets are padded.
        data_rank: this rank's place among the data ranks.
        data_size: number of data ranks.
        max_samples: use only this many, from the start.
        workers: reading ahead.

    Yields:
        batches with ``quantile`` (B,) float64, if there are any, and ``sample_weight`` (B,) float32 next to
        ``sample_key``; the weight is 1, or 0 where a sample is only padding. Every data rank yields the same number of
        batches.

    Raises:
        DataError: a sample can't be read: a validation set is small and its loss must mean the same every time.
    """
    table = sample_table(dataset, max_samples)
    places = _fixed_places(table, len(quantiles) or 1, micro_batch_size, data_size)
    # Every rank gets equally many: validation runs collectives in every batch.
    mine = places[data_rank::data_size]
    reader = SampleReader(dataset, table, seed=0, replace=False)
    log = BadSampleLog(size=len(table), data_size=data_size, known=0, on_bad_sample="error", max_fraction=0.0)
    sampler = [[(index, key) for index, key, _ in batch] for batch in mine]
    loader: DataLoader[Any] = make_torch_loader(reader, sampler, workers or WorkerOptions())
    for batch_places, loaded in zip(mine, loader, strict=True):
        batch = log.check(loaded)
        if quantiles:
            levels = [quantiles[key % len(quantiles)] for _, key, _ in batch_places]
            batch["quantile"] = torch.tensor(levels, dtype=torch.float64)
        batch["sample_weight"] = torch.tensor([weight for _, _, weight in batch_places], dtype=torch.float32)
        yield batch


def _fixed_places(
    table: SampleTable, quantiles: int, micro_batch_size: int, data_size: int
) -> list[list[tuple[int, int, float]]]:
    """Micro-batches of (sample number, key, weight), their number divisible by the data ranks."""
    by_bucket: dict[int, list[tuple[int, int, float]]] = {}
    for index, bucket in enumerate(table.bucket.tolist()):
        by_bucket.setdefault(bucket, []).extend((index, index * quantiles + level, 1.0) for level in range(quantiles))
    batches = []
    for members in by_bucket.values():
        for start in range(0, len(members), micro_batch_size):
            batch = members[start : start + micro_batch_size]
            # Weight 0: it keeps the batch full without counting in the loss.
            filler = (batch[0][0], batch[0][1], 0.0)
            batches.append(batch + [filler] * (micro_batch_size - len(batch)))
    surplus = [[(index, key, 0.0) for index, key, _ in batches[0]]] * (-len(batches) % data_size)
    return batches + surplus


def sample_table(dataset: MapDataset, max_samples: int | None = None) -> SampleTable:
    """Read every sample's bucket and cost once."""
    count = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    return SampleTable.build([dataset.bucket(i) for i in range(count)], [dataset.tokens(i) for i in range(count)])


def make_torch_loader(
    reader: Reader, batches: Iterable[Sequence[Any]], workers: WorkerOptions, collate: Callable[[Any], Any] = join
) -> DataLoader[Any]:
    """A torch loader that reads lists of places and joins what it got.

    Workers are forked where the system can: the data set's columns are then shared, not copied. Nothing that would not
    survive a fork exists by then, since files are opened inside `MapDataset.load` only.
    """
    parallel = workers.num_workers > 0
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    return DataLoader(
        reader,  # type: ignore[arg-type]  # torch asks for a Dataset where any __getitem__ will do
        batch_sampler=batches,  # type: ignore[arg-type]  # as long as it can be iterated over
        num_workers=workers.num_workers,
        prefetch_factor=workers.prefetch_factor if parallel else None,
        multiprocessing_context=method if parallel else None,
        collate_fn=collate,
        pin_memory=workers.pin_memory,
        generator=torch.Generator(),  # torch draws the workers' seeds from it: leave the global generator alone
    )


class _RankSampler(Sampler[Places]):
    """The places of this rank's micro-batches from a position on."""

    def __init__(self, order: DataOrder, position: int, loader: BatchLoader) -> None:
        self.order, self.position = order, position
        self.data_rank, self.data_size, self.accumulation = loader.data_rank, loader.data_size, loader.accumulation

    def __iter__(self) -> Iterator[Places]:
        step, skip = divmod(self.position, self.accumulation)
        epoch, step = divmod(step, self.order.steps_per_epoch)
        while True:
            layout = self.order.epoch(epoch)
            while step < self.order.steps_per_epoch:
                for batch in layout.deal(step, data_rank=self.data_rank, data_size=self.data_size)[skip:]:
                    index, key = layout.index[step, batch].tolist(), layout.key[step, batch].tolist()
                    yield list(zip(index, key, strict=True))
                step, skip = step + 1, 0
            epoch, step = epoch + 1, 0


def _open_bad_log(dataset: MapDataset, data_size: int, on_bad_sample: OnBadSample, max_fraction: float) -> BadSampleLog:
    size, known, examples = len(dataset), 0, []
    if isinstance(dataset, Reporting):
        report = dataset.report
        size, known = size + report.bad, report.bad
        examples = [
            f"{where}: {entry.reason}" for entry in report.skipped.values() if entry.bad for where in entry.examples
        ]
    log = BadSampleLog(
        size=size, data_size=data_size, known=known, on_bad_sample=on_bad_sample, max_fraction=max_fraction
    )
    log.check_opening(examples)
    return log
