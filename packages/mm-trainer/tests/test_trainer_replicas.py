"""What every rank has a copy of is compared before the first step, and what forwards change after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_training import train_rank
from test_trainer_single_model import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


HSDP = "parallel.fully_shard_parallel_size=1"
IGNORED = "parallel.fsdp_plan.ignored_modules=[head]"


@pytest.mark.parametrize(
    ("model", "overrides", "names"),
    [
        ("single_rank_buffer", [], "own"),
        ("single_rank_init", [HSDP], "head.weight"),
        ("single_rank_init", [IGNORED, "model.freeze=[head]"], "head.weight"),
        ("single_batch_norm", [], "blocks.0.1.running_mean, blocks.0.1.running_var, blocks.1.1.running_mean, "),
    ],
)
def test_copies_that_differ_are_named_on_all_ranks(
    run_ranks, config: str, model: str, overrides: list[str], names: str
) -> None:
    with pytest.raises(AssertionError, match="differ between ranks") as info:
        run_ranks(train_rank, 2, {}, [f"model.model_id={model}", *overrides], config)
    assert str(info.value).count(f"that are replicated differ between ranks: {names}") >= 2
    assert not list((Path(config).parent / "run").glob("iter_*"))


@pytest.mark.parametrize("overrides", [[], [HSDP], [IGNORED, "model.freeze=[head]"]])
def test_equal_copies_pass(run_ranks, config: str, overrides: list[str]) -> None:
    run_ranks(train_rank, 2, {}, ["training.train_iters=2", *overrides], config)
