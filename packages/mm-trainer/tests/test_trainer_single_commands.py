"""`cache` and `sample` of a model without a container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_training import read_metrics, trace, train_rank
from test_trainer_single_model import CONFIG

ENCODING = ["model.model_id=single_encoding", "model.freeze=[table]"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(save=tmp_path / "run"), encoding="utf-8")
    return str(path)


def cache_rank(rank: int, world_size: int, config_file: str, overrides: list[str]) -> list[str]:
    """Write the caches; the reports."""
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.cache import write_caches
    from mm_trainer.commands.prepare import prepare
    from mm_trainer.config import load_config

    prepared = prepare(load_config(config_file, overrides), world_size)
    mesh = ParallelMesh.build(prepared.config.mesh, device_type="cpu")
    return [str(report) for report in write_caches(prepared, mesh).values()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_model_trains_from_its_cache_as_without(
    run_ranks: Any, config: str, tmp_path: Path, ranks: int, dtype: str
) -> None:
    common = [*ENCODING, f"parallel.fsdp_plan.param_dtype={dtype}", "training.train_iters=4"]
    validated = ["training.val_interval=4", "data.val_dataset_param.dataset_type=single_rows"]
    plain = run_ranks(train_rank, ranks, {}, [*common, *validated], config)[0]
    (tmp_path / "cache").mkdir()
    cached = [*common, *validated, f"data.cache={tmp_path / 'cache'}", f"training.save={tmp_path / 'cached'}"]
    for reports in run_ranks(cache_rank, ranks, config, cached):
        assert reports == ["32 samples encoded, 0 were there"] * 2
    records = run_ranks(train_rank, ranks, {}, cached, config)[0]
    assert trace(records) == trace(plain)
    assert [r["loss"] for r in records if r["kind"] == "validation"] == [
        r["loss"] for r in plain if r["kind"] == "validation"
    ]
    with pytest.raises(AssertionError, match="the cache is stale"):
        run_ranks(train_rank, ranks, {}, [*cached, "model.dtype=bf16", "training.optimizer=adamw_sr"], config)


def test_a_single_model_without_conditions_has_nothing_to_cache(run_ranks: Any, config: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="model: there is nothing to cache: Regressor has no prepare_c"):
        run_ranks(cache_rank, 1, config, [f"data.cache={tmp_path}"])


def test_a_single_model_samples_with_its_own_sampler(run_ranks: Any, config: str, tmp_path: Path) -> None:
    """A run, an iteration, an exported folder; with the options of its sampler."""
    import av

    from mm_checkpoint import export
    from mm_trainer.commands.sample import describe_options, sample, sampler_of
    from mm_trainer.contracts import SampleRequest

    run_ranks(train_rank, 1, {}, [*ENCODING, "training.train_iters=1"], config)
    run = tmp_path / "run"
    (folder,) = export(run, tmp_path / "exported")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert describe_options(sampler_of(run)) == ["--option gain=VALUE"]
    request = SampleRequest("a card", height=16, width=16, frames=3)
    clips = []
    for number, (source, model) in enumerate(
        [(run, None), (run / "iter_0000001", None), (folder, "single_encoding"), (run, "single_encoding")]
    ):
        (clip,) = sample(source, [request], output=tmp_path / f"clips{number}", model=model, options=["gain=0.5"])
        with av.open(str(clip)) as video:
            frames = [frame.to_ndarray(format="rgb24").mean() for frame in video.decode(video=0)]
        assert len(frames) == 3
        clips.append(frames)
    assert clips.count(clips[0]) == 4


def test_a_single_model_without_a_sampler_is_one_line(run_ranks: Any, config: str, tmp_path: Path) -> None:
    from mm_trainer.commands.sample import sampler_of
    from mm_trainer.errors import InputError

    run_ranks(train_rank, 1, {}, ["training.train_iters=1"], config)
    assert read_metrics(tmp_path / "run")
    with pytest.raises(InputError, match="the model Regressor has no sampler"):
        sampler_of(tmp_path / "run")
    with pytest.raises(InputError, match="the container toy_container has no sampler"):
        sampler_of(tmp_path, "toy_container")
