"""Identity of what a cached entry was made from; never a time, which copying changes."""

from __future__ import annotations

import hashlib
import os
from typing import Protocol, runtime_checkable

from mm_trainer.contracts.dataset import MapDataset

EDGE = 1 << 16
"""Bytes of a file's head and tail that are looked at; a clip that changes, changes its index at one of the ends."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that can say what a sample is made from without decoding it."""

    def fingerprint(self, index: int) -> str:
        """Differs if the source differs; equal on every machine."""
        ...


def sample_fingerprint(dataset: MapDataset, index: int) -> str:
    """A sample's own fingerprint, or its number where the data set knows none."""
    return dataset.fingerprint(index) if isinstance(dataset, Fingerprinted) else f"sample-{index}"


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
