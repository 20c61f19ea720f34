"""Validation: the same figures on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numbers_close import FP32_BLOCK
from rank_training import train_rank


def validation_of(run_ranks: Any, folder: Path, ranks: int, micro_batch_size: int) -> dict[str, float]:
    settings = [
        f"training.save={folder}",
        "training.train_iters=1",
        "training.val_interval=1",
        "training.val_quantiles=[0.2, 0.4, 0.6, 0.8]",
        f"training.micro_batch_size={micro_batch_size}",
        "data.val_dataset_param.dataset_type=toy_squares",
        "data.val_dataset_param.samples=3",
    ]
    records = run_ranks(train_rank, ranks, {}, settings, "recipe:toy/squares")[0]
    record = next(r for r in records if r["kind"] == "validation")
    return {name: value for name, value in record.items() if name.startswith("loss")}


@pytest.mark.numeric
def test_figures_of_every_quantile_on_any_number_of_ranks(run_ranks: Any, tmp_path: Path) -> None:
    """With micro-batches of one, each of two ranks sees two of the four quantiles only."""
    alone = validation_of(run_ranks, tmp_path / "alone", 1, 4)
    assert list(alone) == ["loss", "loss_q0.2", "loss_q0.4", "loss_q0.6", "loss_q0.8"]
    assert len(set(alone.values())) == 5
    for ranks, micro_batch_size in ((2, 1), (2, 2), (4, 1)):
        found = validation_of(run_ranks, tmp_path / f"{ranks}-{micro_batch_size}", ranks, micro_batch_size)
        assert found == pytest.approx(alone, rel=FP32_BLOCK)
