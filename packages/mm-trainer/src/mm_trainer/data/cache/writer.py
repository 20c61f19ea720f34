"""Making the conditions cache: over all ranks, continuing where a killed run stopped.

A sample is done when a shard that holds all its variants is in place; shards are written under another name and
renamed. A kill costs at most the open shard of each rank. The encoders may be sharded over the ranks, so every rank
calls them equally often: ranks that have less to do encode something again and drop it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.bad_samples import Loaded, SampleReader
from mm_trainer.data.batch import collate
from mm_trainer.data.cache.dataset import (
    EMPTY,
    FORMAT,
    SETTINGS,
    SHARDS,
    check_settings,
    read_settings,
    replace_file,
    write_index,
)
from mm_trainer.data.cache.shards import ShardWriter
from mm_trainer.data.identity import sample_fingerprint
from mm_trainer.data.loader import Places, WorkerOptions, make_torch_loader, sample_table
from mm_trainer.data.order import SampleTable
from mm_trainer.data.report import DataReport, copy_report
from mm_trainer.errors import DataError

logger = logging.getLogger(__name__)
T = TypeVar("T")

Encode = Callable[[dict[str, Any]], Mapping[str, Tensor]]
"""A collated batch on the CPU, pixels as bytes → conditions, (B, …) each; no row may depend on another."""
Tokenize = Callable[[Sequence[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class CacheOptions:
    """How a cache is written."""

    variants: int = 1
    """Crops and captions per sample, drawn anew for each; more than one makes sense for a data set that draws."""
    micro_batch_size: int = 1
    """Samples per call of the encoders."""
    shard_bytes: int = 256 << 20
    """A shard is written when it holds this much."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)


@dataclass(frozen=True)
class CacheReport:
    """What `write_cache` did, over all ranks."""

    encoded: int
    """Samples encoded now."""
    found: int
    """Samples that were there already, repeats included."""
    report: DataReport
    """Samples that couldn't be read, and those left out at opening."""

    def __str__(self) -> str:
        return "; ".join([f"{self.encoded} samples encoded, {self.found} were there", *self.report.lines()])


def write_cache(
    folder: Path,
    dataset: MapDataset,
    encode: Encode,
    *,
    settings: Mapping[str, Any],
    tokenizer: Tokenize | None = None,
    options: CacheOptions | None = None,
    data_rank: int = 0,
    data_size: int = 1,
    writes: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> CacheReport:
    """Encode what isn't in the cache yet; called on all ranks.

    Args:
        folder: the cache; created, or continued.
        dataset: the samples, without caption dropout (captions are dropped when the cache is read).
        encode: the frozen encoders.
        settings: what conditions depend on besides the samples: preprocessing and encoder weights; plain values.
        tokenizer: the text encoder's tokenise step, for the empty prompt; None: the model reads no text.
        options: sizes and workers.
        data_rank: this rank's place among the data ranks.
        data_size: number of data ranks.
        writes: False on all but one of the ranks that share a sample.
        progress: called with (batches encoded, batches in all) of this rank.

    Raises:
        DataError: the folder holds a cache made with other settings, the disk is too small, or nothing can be read.
    """
    options = options or CacheOptions()
    table = sample_table(dataset)
    keys = [sample_fingerprint(dataset, index) for index in range(len(dataset))]
    done = _on_first_rank(lambda: _claim(folder, settings, options.variants))
    # Reversed, so that the first of several equal samples wins: each is encoded once.
    first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))
    todo = sorted(index for key, index in first.items() if key not in done)
    probe = _first_readable(dataset)
    names = sorted(encode(_fill([], probe, 1)))
    padded = _encode_empty_prompt(folder, encode, probe, tokenizer)
    sink = ShardWriter(
        folder / SHARDS,
        keys,
        variants=options.variants,
        padded=set(padded),
        shard_bytes=options.shard_bytes,
        writes=writes,
    )
    by_bucket = _by_bucket(table, todo)
    need = _estimate(dataset, table, by_bucket, encode, sink)
    _on_first_rank(lambda: _check_space(folder, len(todo), need))
    batches = _deal(by_bucket, options, data_rank, data_size)
    reader = SampleReader(dataset, table, seed=0, replace=False)
    loader = make_torch_loader(reader, batches, options.workers, collate=list)
    for number, (places, loaded) in enumerate(zip(batches, loader, strict=True), start=1):
        sink.add(places, loaded, encode(_fill(loaded, probe, options.micro_batch_size)))
        if progress is not None:
            progress(number, len(batches))
    sink.flush()
    parts = _gather((sink.located, sink.bad))
    located = done | {key: shard for part, _ in parts for key, shard in part.items()}
    bad = {index: (where, reason) for _, part in parts for index, where, reason in part}
    extra = {"entries": names, "padded": padded, "bad": {keys[index]: found for index, found in bad.items()}}
    _on_first_rank(lambda: _finish(folder, keys, table, dataset, located, extra))
    report = copy_report(dataset)
    for where, reason in bad.values():
        report.skip(where, reason, bad=True)
    return CacheReport(encoded=len(todo) - len(bad), found=len(keys) - len(todo), report=report)


def _claim(folder: Path, settings: Mapping[str, Any], variants: int) -> dict[str, str]:
    """Create the folder, or check that its settings are the same; returns fingerprint → shard of what is done."""
    from safetensors import SafetensorError, safe_open

    wanted = {"format": FORMAT, "variants": variants, "settings": dict(settings)}
    if (folder / SETTINGS).exists():
        made_with = read_settings(folder)
        check_settings(folder, made_with, settings)
        if made_with["variants"] != variants:
            raise DataError(f"{folder}: this cache holds {made_with['variants']} variants per sample, not {variants}")
    elif folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: neither empty nor a cache")
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    replace_file(
        folder / SETTINGS, lambda path: path.write_text(json.dumps(wanted, indent=1, default=str), encoding="utf-8")
    )
    done: dict[str, str] = {}
    for path in sorted((folder / SHARDS).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                done |= dict.fromkeys(json.loads(file.metadata()["samples"]), path.name)
        except SafetensorError as error:
            raise DataError(f"{path}: damaged ({error}): delete it and run again") from error
    return done


def _encode_empty_prompt(
    folder: Path, encode: Encode, probe: Mapping[str, Any], tokenizer: Tokenize | None
) -> dict[str, int]:
    """Store the entries that depend on the prompt, for an empty one; returns the length of those that end in zeros.

    Which entries these are is found by trying: they differ between two prompts.
    """
    if tokenizer is None:
        return {}
    from safetensors.torch import save_file

    batch = _fill([], probe, 1)
    empty, other = (encode(batch | tokenizer([prompt])) for prompt in ("", "a prompt"))
    texts = {name: value[0].cpu().contiguous() for name, value in empty.items() if not torch.equal(value, other[name])}
    if not texts:
        raise DataError("the encoders' output doesn't depend on the prompt, although there is a tokenizer")
    _on_first_rank(lambda: replace_file(folder / EMPTY, lambda path: save_file(texts, path)))
    return {name: len(value) for name, value in texts.items() if value.dim() > 1}


def _by_bucket(table: SampleTable, todo: Sequence[int]) -> list[list[int]]:
    members: dict[int, list[int]] = defaultdict(list)
    for index in todo:
        members[int(table.bucket[index])].append(index)
    return list(members.values())


def _estimate(
    dataset: MapDataset, table: SampleTable, by_bucket: Sequence[Sequence[int]], encode: Encode, sink: ShardWriter
) -> int:
    """Bytes that are still to be written, from one sample of every bucket."""
    need = 0
    reader = SampleReader(dataset, table, seed=0, replace=True)
    for members in by_bucket:
        sample = reader[members[0], 0].sample
        if sample is not None:
            entries = sink.trim({name: value[0] for name, value in encode(_fill([], sample, 1)).items()})
            need += len(members) * sink.variants * sum(value.nbytes for value in entries.values())
    return need


def _check_space(folder: Path, samples: int, need: int) -> None:
    free = shutil.disk_usage(folder).free
    logger.info("%s: %d samples to encode, about %.2f GB", folder, samples, need / 1e9)
    if need > free:
        raise DataError(f"{folder}: about {need / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")


def _deal(by_bucket: Sequence[Sequence[int]], options: CacheOptions, data_rank: int, data_size: int) -> list[Places]:
    """This rank's micro-batches, as many on every rank; a sample's variants stay on one rank."""
    per_rank: list[list[Places]] = [[] for _ in range(data_size)]
    for members in by_bucket:
        for rank, batches in enumerate(per_rank):
            # All variants of a sample on one rank: a shard holds a sample with all of them or not at all.
            places = [(i, i * options.variants + v) for i in members[rank::data_size] for v in range(options.variants)]
            size = options.micro_batch_size
            batches.extend(places[start : start + size] for start in range(0, len(places), size))
    most = max(map(len, per_rank))
    mine = per_rank[data_rank]
    # Empty batches encode the probe: sharded encoders must be called equally often on every rank.
    return mine + [[] for _ in range(most - len(mine))]


def _fill(loaded: Sequence[Loaded], probe: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A batch of full size: what is missing (unreadable, or nothing left to do) is filled with what is there."""
    samples: list[Mapping[str, Any]] = [item.sample for item in loaded if item.sample is not None] or [probe]
    return collate(samples + samples[:1] * (size - len(samples)))


def _finish(
    folder: Path,
    keys: Sequence[str],
    table: SampleTable,
    dataset: MapDataset,
    located: Mapping[str, str],
    extra: Mapping[str, Any],
) -> None:
    rows = [index for index, key in enumerate(keys) if key in located]
    if not rows:
        raise DataError(f"{folder}: nothing could be encoded")
    shards, buckets = sorted({located[keys[row]] for row in rows}), [str(dataset.bucket(row)) for row in rows]
    shard_number = {name: number for number, name in enumerate(shards)}
    bucket_number = {name: number for number, name in enumerate(dict.fromkeys(buckets))}
    write_index(
        folder,
        fingerprints=[keys[row] for row in rows],
        shard=[shard_number[located[keys[row]]] for row in rows],
        bucket=[bucket_number[bucket] for bucket in buckets],
        tokens=[int(table.tokens[row]) for row in rows],
        extra={"shards": shards, "buckets": list(bucket_number), **extra},
    )


def _first_readable(dataset: MapDataset) -> Mapping[str, Any]:
    reader = SampleReader(dataset, SampleTable.build([0] * len(dataset), [1] * len(dataset)), seed=0, replace=True)
    loaded = reader[0, 0]
    if loaded.sample is None:
        _, where, reason = loaded.bad[0]
        raise DataError(f"nothing can be read, {len(loaded.bad)} samples tried: {where}: {reason}")
    return loaded.sample


def _on_first_rank(function: Callable[[], T]) -> T:
    """Run on rank 0 alone and give all ranks what it returned, or the reason why it failed."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for it
            failure, outcome[1] = error, str(error)
    # The failure travels too: ranks that only waited for a value would hang.
    dist.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise DataError(f"rank 0: {outcome[1]}")
    value: T = outcome[0]
    return value


def _gather(value: T) -> Iterable[T]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
