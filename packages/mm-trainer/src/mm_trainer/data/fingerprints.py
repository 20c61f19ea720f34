"""Identity of what a cached entry was made from; never a time, which copying changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.report import Naming

EDGE = 1 << 16
"""Bytes of a file's head and tail that are looked at; a clip that changes, changes its index at one of the ends."""
SAMPLES, BLOCK = 1024, 1 << 12


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


def weights_digest(path: Path) -> bytes:
    """Digest of a file's size and of `SAMPLES` blocks spread evenly over it, head and tail among them; of a small file,
    of everything. A merge into some layers changes neither head nor tail, but whole matrices between them."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= SAMPLES * BLOCK:
            digest.update(file.read())
        else:
            for number in range(SAMPLES):
                file.seek((size - BLOCK) * number // (SAMPLES - 1))
                digest.update(file.read(BLOCK))
    return digest.digest()


def file_digest(path: str) -> bytes:
    """Digest of a file's size, head and tail; of a file that isn't there, of nothing."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little") + file.read(EDGE))
            file.seek(max(EDGE, size - EDGE))
            digest.update(file.read())
    except FileNotFoundError:
        return b""
    return digest.digest()
