"""No collective waits for one rank's long work."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rank_training import trace, train_rank
from test_integration_toy import RECIPE, write_published_weights

GROUP_TIMEOUT_S, CONVERSION_S = 4.0, 6.0


def train_with_a_slow_conversion(rank: int, world_size: int, overrides: list[str]) -> tuple[list[float], list[str]]:
    """Every collective of this run fails after `GROUP_TIMEOUT_S`; returns the losses and what was said."""
    import torch.distributed as dist

    from mm_checkpoint._weights import conversion_cache, identity

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT_S), dist.group.WORLD)
    write = conversion_cache.write_dcp_folder

    def write_slowly(*args: Any, on_bytes: Any, **options: Any) -> None:
        time.sleep(CONVERSION_S)
        write(*args, on_bytes=on_bytes, **options)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mm_checkpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with (
        patch.object(conversion_cache, "write_dcp_folder", write_slowly),
        patch.object(identity, "PROGRESS_EVERY_S", 0.0),
    ):
        records = train_rank(rank, world_size, {}, overrides, RECIPE)
    return trace(records), said


def test_a_conversion_longer_than_the_group_s_timeout(run_ranks, tmp_path: Path) -> None:
    """B099. One rank converts, the other waits at a lock on the disk, and both say so."""
    weights, cache = write_published_weights(tmp_path / "published"), tmp_path / "cache"
    source = [
        f"model.models.predictor.from_pretrained={weights}",
        "model.models.predictor.load_format=dcp",
        f"model.models.predictor.dcp_cache_dir={cache}",
    ]
    slow = run_ranks(train_with_a_slow_conversion, 2, [f"training.save={tmp_path / 'slow'}", *source], timeout=120)
    said = [text for _, per_rank in slow for text in per_rank]
    assert sum(text.startswith("converting") and " into " in text for text in said) == 1, "converted once"
    assert any("another process converts into it; waiting" in text for text in said)
    assert any(" GB" in text for text in said), "progress"
    direct = run_ranks(train_rank, 2, {}, [f"training.save={tmp_path / 'direct'}", source[0]], RECIPE)[0]
    assert slow[0][0] == trace(direct)
    assert json.loads((cache / "iter_0000000" / "manifest.json").read_text(encoding="utf-8"))["converted_from"] == "hf"
