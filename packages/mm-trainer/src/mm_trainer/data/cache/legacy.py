"""Reading caches that version 0.1 made, which told encoders' weights apart by samples of their bytes.

Such a cache holds hours of encoding, so it stays usable under the rule by which it was made. A new one never uses it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from mm_checkpoint import WeightSource

logger = logging.getLogger(__name__)

_BLOCKS, _LENGTH = 1024, 1 << 12


def is_of_0_1(weights: Any) -> bool:
    """Whether a cache states its weights as version 0.1 did: 32 hexadecimal digits without the name of a rule."""
    return isinstance(weights, str) and len(weights) == 32


def weights_as_0_1_stated(source: WeightSource, *, cache: Path) -> str:
    """What version 0.1 would state of ``source`` in a cache; logs that this cache is compared this way."""
    logger.warning(
        "%s was made by version 0.1, which compared %d places of the encoders' weights and not all bytes; it is "
        "compared in the same way (%s)",
        cache,
        _BLOCKS,
        source.path,
    )
    digest = hashlib.blake2b(json.dumps(source.config, sort_keys=True).encode(), digest_size=16)
    for path in source.files:
        digest.update(path.name.encode() + _sampled(path))
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if size <= _BLOCKS * _LENGTH:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek((size - _LENGTH) * number // (_BLOCKS - 1))
                digest.update(file.read(_LENGTH))
    return digest.digest()
