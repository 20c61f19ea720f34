"""Draws from torch's, numpy's and Python's global generators: a function of the samples, wherever they are made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbers_close import FP32_TRACE
from rank_training import read_checkpoint, trace, train_rank

from mm_trainer.data.loader import BatchLoader, WorkerOptions
from mm_trainer.randomness import seed_generators

CONFIG = """
parallel:
  fsdp_plan: {{apply_modules: ["blocks.{{*}}"], param_dtype: fp32}}
model: {{model_id: single_dropout}}
data:
  dataset_param: {{dataset_type: single_rows}}
  dataloader_param: {{num_workers: 0}}
training:
  plugin: [trainer_plugin_models]
  save: {save}
  save_async: false
  micro_batch_size: 2
  global_batch_size: 4
  gradient_accumulation_steps: auto
  train_iters: 6
  lr: 0.02
"""
RECOMPUTE = "features.recompute_plan.apply_modules=['blocks.{*}']"


def train(run_ranks: Any, folder: Path, ranks: int = 1, overrides: Sequence[str] = ()) -> list[float]:
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(save=folder / "run"), encoding="utf-8")
    return trace(run_ranks(train_rank, ranks, {}, list(overrides), str(config))[0])


@pytest.mark.numeric
def test_a_model_with_dropout_gives_one_trace(run_ranks, tmp_path: Path) -> None:
    """Twice, with recompute, on two ranks; and another one with another seed."""
    first = train(run_ranks, tmp_path / "first")
    assert train(run_ranks, tmp_path / "again") == first
    assert train(run_ranks, tmp_path / "recompute", overrides=[RECOMPUTE]) == first
    np.testing.assert_allclose(train(run_ranks, tmp_path / "two", ranks=2), first, rtol=FP32_TRACE)
    assert train(run_ranks, tmp_path / "seed", overrides=["training.seed=7"])[0] != first[0]


def test_dropout_differs_from_step_to_step(run_ranks, tmp_path: Path) -> None:
    """With a learning rate of 0 and one batch for ever, only the masks tell two steps apart."""
    same = ["training.lr=0", "data.dataset_param.samples=4", "data.dataloader_param.shuffle=false"]
    losses = train(run_ranks, tmp_path / "run", overrides=same)
    assert len(set(losses)) == len(losses)


def test_a_run_with_dropout_resumes_to_the_bit(run_ranks, tmp_path: Path) -> None:
    whole = train(run_ranks, tmp_path / "whole", ranks=2)
    train(run_ranks, tmp_path / "parts", 2, ["training.train_iters=3"])
    rest = train(run_ranks, tmp_path / "parts", 2, ["training.load=auto"])
    assert rest[-3:] == whole[-3:]
    expected, found = (read_checkpoint(tmp_path / name / "run" / "iter_0000006") for name in ("whole", "parts"))
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


class Dice:
    """A data set of somebody who knows nothing of keyed generators."""

    def __len__(self) -> int:
        return 12

    def bucket(self, index: int) -> int:
        return 0

    def tokens(self, index: int) -> int:
        return 1

    def load(self, index: int, sample_key: int) -> dict[str, Any]:
        return {"drawn": torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])}


def draw(workers: int, *, skip: int = 0) -> list[torch.Tensor]:
    loader = BatchLoader(Dice(), micro_batch_size=2, seed=5, workers=WorkerOptions(num_workers=workers))
    loader.seek(skip)
    batches = iter(loader)
    return [next(batches)["drawn"] for _ in range(8 - skip)]


def test_what_a_data_set_draws_depends_on_the_sample_alone() -> None:
    """Not on the workers, nor on where the run began, and epochs differ."""
    here = torch.stack(draw(0))
    assert torch.equal(torch.stack(draw(2)), here)
    assert torch.equal(torch.stack(draw(1, skip=3)), here[3:])
    assert len(here.flatten(0, 1).unique(dim=0)) == 16, "two epochs, no sample like another"


def test_all_generators_are_set() -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    with torch.random.fork_rng(devices=[]):
        seed_generators(1, "step", 4)
        first = draws()
        seed_generators(1, "step", 5)
        assert all(a != b for a, b in zip(draws(), first, strict=True))
        seed_generators(1, "step", 4)
        assert draws() == first
