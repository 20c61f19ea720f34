"""Validation: the same figures on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numbers_close import FP32_BLOCK
from rank_training import train_rank
from test_trainer_single_model import CONFIG
from trainer_plugin_models import STEPS


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


def records_of(run_ranks: Any, folder: Path, ranks: int, model: str, *more: str) -> list[dict[str, Any]]:
    """Records of a run of two steps, of a model without a container, with a validation before and after them."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(save=folder / "run"), encoding="utf-8")
    settings = [
        f"model.model_id={model}",
        "training.train_iters=2",
        "training.val_interval=2",
        "training.val_quantiles=[0.25, 0.5]",
        "data.val_dataset_param.dataset_type=single_rows",
        "data.val_dataset_param.samples=6",
        *more,
    ]
    return run_ranks(train_rank, ranks, {}, settings, str(config))[0]


def figures(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("loss")}


@pytest.mark.numeric
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_a_pipeline_honours_the_quantile(run_ranks: Any, tmp_path: Path, ranks: int) -> None:
    """Losses at two quantiles of a loss that is t times a constant; training draws t by seed and sample."""
    from mm_trainer.randomness import keyed_uniform

    before, *trained, after = records_of(run_ranks, tmp_path, ranks, "single_noised", "training.lr=0.001")
    assert [r["kind"] for r in (before, *trained, after)] == ["validation", "train", "train", "validation"]
    for record in (before, after):
        found = figures(record)
        assert list(found) == ["loss", "loss_q0.25", "loss_q0.5"]
        assert found["loss_q0.5"] == pytest.approx(2 * found["loss_q0.25"])
        assert found["loss"] == pytest.approx(1.5 * found["loss_q0.25"])
    bias = before["loss_q0.5"] / (0.5 * STEPS)
    import torch

    drawn = (keyed_uniform(42, "sigma", torch.arange(4)) * STEPS).long().double().mean()
    assert trained[0]["loss"] == pytest.approx(float(drawn) * bias, rel=FP32_BLOCK)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["single_regressor", "single_narrow", "single_own_draw"])
def test_quantiles_that_nobody_reads_are_not_printed(run_ranks: Any, tmp_path: Path, ranks: int, model: str) -> None:
    for record in records_of(run_ranks, tmp_path, ranks, model):
        assert list(figures(record)) == ["loss"], "nor are losses by sigma, in training"


def test_each_sample_is_seen_once_without_levels(run_ranks: Any, tmp_path: Path) -> None:
    """The mean over the samples is that of the model called on them, quantiles or not."""
    one, two = (
        figures(
            records_of(run_ranks, tmp_path / quantiles, 1, "single_regressor", f"training.val_quantiles={value}")[0]
        )
        for quantiles, value in (("one", "[0.5]"), ("two", "[0.25, 0.5, 0.75]"))
    )
    assert one == two


def test_a_model_that_begins_with_zeros_is_asked_again(run_ranks: Any, tmp_path: Path) -> None:
    """Untrained, it returns the same at every noise level, though it reads the quantile."""
    records = records_of(run_ranks, tmp_path, 2, "single_fresh", "training.lr=0.1")
    before, after = (figures(record) for record in records if record["kind"] == "validation")
    assert before == {"loss": 1.0}
    assert list(after) == ["loss", "loss_q0.25", "loss_q0.5"]
    assert after["loss_q0.5"] < after["loss_q0.25"] < 1


def test_reserved_names_are_refused_in_a_data_set(run_ranks: Any, tmp_path: Path) -> None:
    for name in ("quantile", "sample_weight", "sample_key"):
        with pytest.raises(AssertionError, match=f"the data set yields {name}, a name that is reserved"):
            records_of(run_ranks, tmp_path, 1, "single_regressor", f"data.dataset_param.extra={name}")
