"""Identity of what a cached entry was made from; never a time, which copying changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.report import Naming

_EDGE = 1 << 16


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that can say what a sample is made from without decoding it."""

    def fingerprint(self, index: int) -> str:
        """Differs if the source differs; equal on every machine."""
        ...


def sample_fingerprint(dataset: MapDataset, index: int) -> str:
    """A sample's own fingerprint, or its number if the data set has none."""
    return dataset.fingerprint(index) if isinstance(dataset, Fingerprinted) else f"sample-{index}"


def names_digest(dataset: MapDataset) -> int | None:
    """Digest of the samples' names in their order; None for a data set that has none."""
    if not isinstance(dataset, Naming):
        return None
    digest = hashlib.blake2b(digest_size=7)
    for index in range(len(dataset)):
        digest.update(dataset.name(index).encode("utf-8", "surrogateescape") + b"\0")
    return int.from_bytes(digest.digest(), "little")


def clip_digest(path: str | Path) -> bytes:
    """Digest of a clip's size, head and tail: one that changes, changes its index at one of the ends.

    Weights are compared by `mm_checkpoint.source_digest`. A file that isn't there gives nothing, ``b""``.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= 2 * _EDGE:
                digest.update(file.read())
            else:
                digest.update(file.read(_EDGE))
                file.seek(size - _EDGE)
                digest.update(file.read(_EDGE))
    except FileNotFoundError:
        return b""
    return digest.digest()
