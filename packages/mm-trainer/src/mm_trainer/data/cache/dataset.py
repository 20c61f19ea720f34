"""The conditions cache: what the frozen encoders make of a data set, on disk.

```
<cache>/cache.json            what the entries were made with: settings of the data, digests of the encoders
<cache>/shards/*.safetensors  tensors named <fingerprint>/<variant>/<entry>; metadata: which samples, as JSON
<cache>/empty.safetensors     the empty prompt's entries, for caption dropout
<cache>/index.safetensors     one row per sample of the data set: fingerprint, shard, bucket, tokens; written last
```

An entry is found by its sample's fingerprint, so rows may be added, removed and moved; a clip or caption that changed
is no longer found, so it can't be used by mistake. Entries of text are stored without the zeros past the prompt's
end, and padded again when read. `mm_trainer.data.cache.writer` writes it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.identity import sample_fingerprint
from mm_trainer.data.report import DataReport, Naming, copy_report
from mm_trainer.data.video.captions import draw_caption
from mm_trainer.errors import BadSample, DataError
from mm_trainer.randomness import keyed_generator

logger = logging.getLogger(__name__)

NAMED = 5
"""Samples that a message names."""
UNKNOWN = "unknown"
"""Stands for a setting that isn't known here, so that it isn't compared."""
FORMAT = 1
SETTINGS, SHARDS, EMPTY, INDEX = "cache.json", "shards", "empty.safetensors", "index.safetensors"


class CachedDataset:
    """A data set read from its cache: samples ``{"conditions": {...}}`` as the encoders made them.

    Args:
        folder: the cache.
        dataset: what it was made from, if available: its samples, in its order, are looked up by fingerprint, and
            those that aren't found (new, or changed since) are left out and reported as bad. None: the cache is used
            unchanged, in the order of the data set that it was made from.
        settings: what the run would make its conditions with, as `write_cache` was told; None: not compared.
        seed: the run's seed.
        caption_dropout: probability of the empty prompt.

    Raises:
        DataError: no cache, an unfinished one, or one that was made with other settings; names what differs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dataset: MapDataset | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        caption_dropout: float = 0.0,
    ) -> None:
        self.folder, self.seed, self.caption_dropout = folder, seed, caption_dropout
        made_with = read_settings(folder)
        if settings is not None:
            check_settings(folder, made_with, settings)
        self.variants = int(made_with["variants"])
        columns, extra = _read_index(folder)
        self._shards: list[str] = extra["shards"]
        self._padded: dict[str, int] = extra["padded"]
        self._buckets: list[str] = extra["buckets"]
        self._entries: list[str] = extra["entries"]
        if dataset is None:
            rows = np.arange(len(columns["fingerprint"]))
            self.report = DataReport(rows=len(rows))
        else:
            rows, self.report = _match(dataset, columns["fingerprint"], extra.get("bad", {}), folder)
        if not len(rows):
            raise DataError(f"{folder}: nothing usable: {'; '.join(self.report.lines()) or 'it is empty'}")
        self._fingerprint, self._shard = columns["fingerprint"][rows], columns["shard"][rows]
        self._bucket, self._tokens = columns["bucket"][rows], columns["tokens"][rows]
        self._empty = _read_tensors(folder / EMPTY) if (folder / EMPTY).exists() else {}
        if caption_dropout and not self._empty:
            raise DataError(f"{folder}: caption_dropout needs the empty prompt, which this cache doesn't hold")

    def __len__(self) -> int:
        return len(self._shard)

    def bucket(self, index: int) -> Hashable:
        return self._buckets[self._bucket[index]]

    def tokens(self, index: int) -> int:
        return int(self._tokens[index])

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        """One sample's conditions; which of several variants, and whether the prompt is dropped, follows from its key.

        Raises:
            BadSample: the shard is damaged or gone.
        """
        variant = 0
        if self.variants > 1:
            generator = keyed_generator(self.seed, "variant", sample_key)
            variant = int(torch.randint(self.variants, (), generator=generator))
        prefix = f"{self._fingerprint[index].decode()}/{variant}/"
        conditions = self._read_entries(self.folder / SHARDS / self._shards[self._shard[index]], prefix)
        for name, length in self._padded.items():
            conditions[name] = pad_rows(conditions[name], length)
        if self.caption_dropout and draw_caption(self.seed, sample_key)[0] < self.caption_dropout:
            conditions |= self._empty
        return {"conditions": conditions}

    def _read_entries(self, path: Path, prefix: str) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        try:
            # Opened per sample: no file handle outlives a sample or crosses a fork into a worker.
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(prefix + name) for name in self._entries}
        except (OSError, SafetensorError) as error:
            raise BadSample(str(path), str(error)) from error


def read_settings(folder: Path) -> dict[str, Any]:
    """What a cache was made with.

    Raises:
        DataError: there is no cache, or it is of another format.
    """
    path = folder / SETTINGS
    if not path.is_file():
        raise DataError(f"no cache at {folder.absolute()}: make one with `mm-trainer cache`")
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error})") from error
    if settings.get("format") != FORMAT:
        raise DataError(f"{folder}: a cache of format {settings.get('format')}, this version reads {FORMAT}")
    return settings


def check_settings(folder: Path, made_with: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a cache made with other settings, except those that are `UNKNOWN` here."""
    there, here = flatten(made_with.get("settings", {})), flatten(wanted)
    differing = [
        f"{name}: {_stated(there, name)} there, {_stated(here, name)} here"
        for name in sorted(there.keys() | here.keys())
        if here.get(name) != UNKNOWN and _stated(there, name) != _stated(here, name)
    ]
    if differing:
        raise DataError(f"{folder}: the cache is stale, it was made with other settings: {'; '.join(differing)}")


def _stated(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not stated"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, as they come back from JSON."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return flat


def trim_rows(tensor: Tensor) -> Tensor:
    """Without the rows of zeros at the end of dim 0; keeps at least one."""
    filled = tensor.flatten(1).ne(0).any(1).nonzero()
    return tensor[: max(1, int(filled[-1]) + 1 if len(filled) else 0)]


def pad_rows(tensor: Tensor, length: int) -> Tensor:
    """Undo `trim_rows`."""
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


def _match(
    dataset: MapDataset, fingerprints: NDArray[Any], bad: Mapping[str, Sequence[str]], folder: Path
) -> tuple[NDArray[np.int64], DataReport]:
    """Rows of the index for the samples of a data set, in its order; those that couldn't be encoded go into the report.

    Raises:
        DataError: the cache lacks a sample, or holds it as it was before it changed. Going on without it would train on
            a smaller data set than the configuration says.
    """
    place = {fingerprint.decode(): row for row, fingerprint in enumerate(fingerprints)}
    report, rows, stale = copy_report(dataset), [], []
    with ThreadPoolExecutor() as pool:  # what takes time is the file system
        for index, key in enumerate(pool.map(lambda i: sample_fingerprint(dataset, i), range(len(dataset)))):
            row = place.get(key)
            if row is not None:
                rows.append(row)
            elif key in bad:
                where, reason = bad[key]
                report.skip(where, reason, bad=True)
            else:
                stale.append(dataset.name(index) if isinstance(dataset, Naming) else f"sample {index}")
    if stale:
        more = f" and {len(stale) - NAMED} more" if len(stale) > NAMED else ""
        raise DataError(
            f"{folder}: {len(stale)} of {len(dataset)} samples are not in the cache, or changed since it was made: "
            f"{', '.join(stale[:NAMED])}{more}; `mm-trainer cache` encodes those, and only those"
        )
    return np.array(rows, dtype=np.int64), report


def _read_index(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    path = folder / INDEX
    if not path.is_file():
        raise DataError(
            f"{folder}: the cache isn't finished: run `mm-trainer cache` again, it goes on where it stopped"
        )
    try:
        with safe_open(path, framework="np") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            extra = {name: json.loads(value) for name, value in file.metadata().items()}
    except SafetensorError as error:
        raise DataError(f"{path}: damaged ({error}): delete it and run `mm-trainer cache` again") from error
    width = columns["fingerprint"].shape[1]
    columns["fingerprint"] = np.ascontiguousarray(columns["fingerprint"]).view(f"S{width}")[:, 0]
    return columns, extra


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def write_index(
    folder: Path,
    *,
    fingerprints: Sequence[str],
    shard: Sequence[int],
    bucket: Sequence[int],
    tokens: Sequence[int],
    extra: Mapping[str, Any],
) -> None:
    """Write the index, last and atomically.

    Args:
        folder: the cache.
        fingerprints: of every sample, in the order of the data set; so are ``shard``, ``bucket`` and ``tokens``.
        shard: place of the sample's shard in ``extra["shards"]``.
        bucket: place of its bucket in ``extra["buckets"]``.
        tokens: its cost.
        extra: ``shards``, ``buckets``, ``entries`` (names), ``padded`` (name → length of what is stored trimmed),
            ``bad`` (fingerprint → where and why, of samples that can't be read).
    """
    from safetensors.numpy import save_file

    keys = np.array([key.encode() for key in fingerprints])
    columns = {
        "fingerprint": keys.view(np.uint8).reshape(len(keys), -1),
        "shard": np.array(shard, dtype=np.int32),
        "bucket": np.array(bucket, dtype=np.int32),
        "tokens": np.array(tokens, dtype=np.int64),
    }
    metadata = {name: json.dumps(value) for name, value in extra.items()}
    replace_file(folder / INDEX, lambda path: save_file(columns, path, metadata=metadata))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file next to its final name and rename it, so that no reader sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two jobs may write one cache
    write(partial)
    partial.replace(path)
