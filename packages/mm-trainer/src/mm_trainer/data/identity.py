"""Identity of what a cached entry was made from; never a time, which copying changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.report import Naming

Sampling = tuple[int, int]
"""How many blocks of a file are looked at, and the bytes of each."""
EDGES: Sampling = (2, 1 << 16)
"""For clips: one that changes, changes its index at one of the ends."""
THROUGHOUT: Sampling = (1024, 1 << 12)
"""For weights: a merge into some layers changes neither head nor tail, but whole matrices between them."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that can say what a sample is made from without decoding it."""

    def fingerprint(self, index: int) -> str:
        """Differs if the source differs; equal on every machine."""
        ...


def sample_fingerprint(dataset: MapDataset, index: int) -> str:
    """A sample's own fingerprint, or its number where the data set knows none."""
    return dataset.fingerprint(index) if isinstance(dataset, Fingerprinted) else f"sample-{index}"


def names_digest(dataset: MapDataset) -> int | None:
    """Digest of the samples' names in their order; None for a data set that has none."""
    if not isinstance(dataset, Naming):
        return None
    digest = hashlib.blake2b(digest_size=7)
    for index in range(len(dataset)):
        digest.update(dataset.name(index).encode("utf-8", "surrogateescape") + b"\0")
    return int.from_bytes(digest.digest(), "little")


def file_digest(path: str | Path, sampling: Sampling = EDGES) -> bytes:
    """Digest of a file's size and of blocks spread evenly over it, head and tail among them.

    A file that is no larger than the blocks is looked at as a whole; one that isn't there gives nothing, ``b""``.
    """
    blocks, length = sampling
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= blocks * length:
                digest.update(file.read())
            else:
                for number in range(blocks):
                    file.seek((size - length) * number // (blocks - 1))
                    digest.update(file.read(length))
    except FileNotFoundError:
        return b""
    return digest.digest()
