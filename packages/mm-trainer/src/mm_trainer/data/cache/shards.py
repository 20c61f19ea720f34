"""Shards of the conditions cache: collecting what was encoded, and writing it."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mm_trainer.data.bad_samples import Loaded
from mm_trainer.data.cache.dataset import replace_file, trim_rows
from mm_trainer.data.loader import Places

SHARD_SAMPLES = 1024
"""A shard holds no more samples than this: its header is read with every sample."""


class ShardWriter:
    """Collects encoded samples and writes them in shards.

    Args:
        folder: of the shards.
        keys: fingerprint of every sample.
        variants: of every sample; a sample is written when it has all of them.
        padded: names of the entries that end in zeros.
        shard_bytes: a shard is written when it holds this much.
        writes: False only keeps count.
    """

    def __init__(
        self, folder: Path, keys: Sequence[str], *, variants: int, padded: set[str], shard_bytes: int, writes: bool
    ) -> None:
        self.folder, self.keys, self.writes = folder, keys, writes
        self.variants, self.padded, self.shard_bytes = variants, padded, shard_bytes
        self.located: dict[str, str] = {}
        """Fingerprint → shard, of what this rank wrote."""
        self.bad: list[tuple[int, str, str]] = []
        self._open: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        """Sample → variant → entries, while variants are missing."""
        self._ready: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._bytes = 0

    def add(self, places: Places, loaded: Sequence[Loaded], conditions: Mapping[str, Tensor]) -> None:
        """Take the rows of a batch; those past ``places`` only filled it up."""
        row = 0
        for (index, key), item in zip(places, loaded, strict=True):
            if item.sample is None:
                self.bad.extend(item.bad)
                continue
            entries = self.trim({name: value[row] for name, value in conditions.items()})
            row += 1
            self._open[index][key % self.variants] = entries
            self._bytes += sum(value.nbytes for value in entries.values())
            if len(self._open[index]) == self.variants:
                self._ready[index] = self._open.pop(index)
        if self._bytes >= self.shard_bytes or len(self._ready) >= SHARD_SAMPLES:
            self.flush()

    def trim(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As they are stored: on the CPU, text without the zeros past its end."""
        stored = {name: trim_rows(value) if name in self.padded else value for name, value in entries.items()}
        # Cloned: a row is a view that would keep the whole batch in memory.
        return {name: value.detach().cpu().clone() for name, value in stored.items()}

    def flush(self) -> None:
        """Write what is complete as one shard."""
        from safetensors.torch import save_file

        complete = {self.keys[index]: variants for index, variants in self._ready.items()}
        self._ready, self._bytes = {}, 0
        if not complete or not self.writes:
            return
        # By all that is in it: a job on other ranks cuts the samples into other shards.
        name = f"{hashlib.blake2b(''.join(complete).encode(), digest_size=8).hexdigest()}.safetensors"
        tensors = {
            f"{key}/{variant}/{entry}": value
            for key, variants in complete.items()
            for variant, entries in variants.items()
            for entry, value in entries.items()
        }
        replace_file(
            self.folder / name,
            lambda path: save_file(tensors, path, metadata={"samples": json.dumps(list(complete))}),
        )
        self.located |= dict.fromkeys(complete, name)
