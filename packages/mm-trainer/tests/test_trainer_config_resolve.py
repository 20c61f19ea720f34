"""Resolving for a number of ranks: `auto`, the batch formula, rules between sections."""

from __future__ import annotations

from pathlib import Path

import pytest
from cfg_helpers import CONTAINER, SINGLE, environment, line_of, write

from mm_trainer.config import ResolvedConfig, load_config, resolve
from mm_trainer.config.resolving import smallest_world_size
from mm_trainer.errors import ConfigError


def resolved(folder: Path, text: str, world_size: int, *overrides: str) -> ResolvedConfig:
    return resolve(load_config(write(folder, text), overrides, environment=environment(folder)), world_size)


def test_auto_sizes_are_settled(tmp_path: Path) -> None:
    config = resolved(tmp_path, SINGLE, 8, "parallel.ulysses_parallel_size=2", "training.micro_batch_size=3")
    assert (config.mesh.replicate, config.mesh.shard, config.mesh.ulysses, config.mesh.ring) == (1, 8, 2, 1)
    assert config.data_parallel_size == 4
    assert config.parallel.fully_shard_parallel_size == 8
    assert config.parallel.data_parallel_size == 4
    assert config.training.global_batch_size == 12


@pytest.mark.parametrize(("ranks", "micro", "steps"), [(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1)])
def test_accumulation_follows_from_the_global_batch(tmp_path: Path, ranks: int, micro: int, steps: int) -> None:
    """B097: the same global batch on any layout."""
    config = resolved(
        tmp_path,
        SINGLE,
        ranks,
        "training.global_batch_size=4",
        "training.gradient_accumulation_steps=auto",
        f"training.micro_batch_size={micro}",
    )
    assert config.training.gradient_accumulation_steps == steps
    assert config.training.global_batch_size == 4


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            "2",
            "expected micro_batch_size 1 × data parallel 4 × gradient_accumulation_steps 2 = 8, got 6; correct it, "
            "leave it out, or let gradient_accumulation_steps be auto",
        ),
        (
            "auto",
            "6 can't be reached: micro_batch_size 1 × data parallel 4 = 4 samples per accumulation step doesn't "
            "divide it",
        ),
    ],
)
def test_a_global_batch_that_doesn_t_fit_is_refused_with_the_formula(tmp_path: Path, steps: str, said: str) -> None:
    """B097: `global_batch != micro × dp × acc` is refused with the formula."""
    text = SINGLE + f"  global_batch_size: 6\n  gradient_accumulation_steps: {steps}\n"
    with pytest.raises(ConfigError, match="micro_batch_size") as caught:
        resolved(tmp_path, text, 4)
    assert caught.value.message == said
    assert (caught.value.key, caught.value.line) == (
        "training.global_batch_size",
        line_of(text, "global_batch_size: 6"),
    )


def test_warm_up_counts_updates(tmp_path: Path) -> None:
    """B096: the learning rate after an update is the same for any number of ranks and accumulated micro-batches."""
    from mm_trainer.commands.train import make_learning_rate

    rates = set()
    for ranks in (1, 2):
        for steps in (1, 4):
            config = resolved(
                tmp_path,
                SINGLE,
                ranks,
                "training.train_iters=10",
                "training.lr_warmup_iters=2",
                "training.lr_decay_style=cosine",
                f"training.gradient_accumulation_steps={steps}",
            )
            schedule = make_learning_rate(config.training, steps_per_epoch=5)
            rates.add(tuple(schedule.at(step) for step in range(10)))
    assert len(rates) == 1


@pytest.mark.parametrize(
    ("ranks", "overrides", "key", "said"),
    [
        (4, ["parallel.ulysses_parallel_size=3"], "parallel.ulysses_parallel_size", "3 × 1 = 3 doesn't divide the 4"),
        (4, ["parallel.fully_shard_parallel_size=3"], "parallel.fully_shard_parallel_size", "allowed: 1, 2, 4"),
        (
            1,
            ["model.models.predictor.allow_missing=[head]"],
            "model.models.predictor.allow_missing",
            "neither from_pretrained nor checkpoint_path is given",
        ),
        (1, ["model.models.predictor.load_format=hf"], "model.models.predictor.load_format", "only read with weights"),
        (
            1,
            ["model.models.predictor.dcp_cache_dir=x"],
            "model.models.predictor.dcp_cache_dir",
            "only read with weights",
        ),
        (
            1,
            ["model.models.predictor.from_pretrained=x", "model.models.predictor.dcp_cache_dir=y"],
            "model.models.predictor.dcp_cache_dir",
            "only read with load_format: dcp, and it is auto",
        ),
        (4, ["parallel.data_parallel_size=3"], "parallel.data_parallel_size", "leave it out or correct it"),
        (
            4,
            ["parallel.fully_shard_parallel_size=1", "parallel.ring_attention_size=2"],
            "parallel.fully_shard_parallel_size",
            "must be a multiple of ulysses × ring = 1 × 2 = 2",
        ),
        (
            4,
            ["parallel.fsdp_plan.sub_plans={encoder: {shard_size: 3}}"],
            "parallel.fsdp_plan.sub_plans.encoder.shard_size",
            "3 doesn't divide the 4 ranks",
        ),
        (
            4,
            ["parallel.fsdp_plan.sub_plans={predictor: {shard_size: 2}}"],
            "parallel.fsdp_plan.sub_plans.predictor.shard_size",
            "say so with trainable: true",
        ),
        (
            4,
            ["parallel.fsdp_plan.sub_plans={encoder: {trainable: true}}"],
            "parallel.fsdp_plan.sub_plans.encoder.trainable",
            "model.models.encoder.freeze is true",
        ),
        (
            4,
            ["parallel.fsdp_plan.sub_plans={predictor: {enabled: false}}"],
            "parallel.fsdp_plan.sub_plans.predictor.enabled",
            "gradients must be reduced",
        ),
        (
            4,
            ["parallel.fsdp_plan.sub_plans={predicter: {}}"],
            "parallel.fsdp_plan.sub_plans.predicter",
            "did you mean 'predictor'? (there are: encoder, predictor)",
        ),
        (
            4,
            [
                "parallel.fsdp_plan.sub_plans={encoder: {shard_size: 2}}",
                "parallel.fsdp_plan.ignored_modules=[encoder]",
                "parallel.fsdp_plan.apply_modules=[predictor]",
            ],
            "parallel.fsdp_plan.sub_plans.encoder",
            "ignored_modules names encoder as well",
        ),
        (2, ["model.models.predictor.freeze=true"], "model", "nothing to train"),
        (2, ["training.val_interval=10"], "training.val_interval", "data.val_dataset_param is not given"),
        (2, ["tools.profile.enable=true", "tools.profile.ranks=[0, 2]"], "tools.profile.ranks", "rank 2 is not one of"),
    ],
)
def test_rules_between_sections(tmp_path: Path, ranks: int, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=".") as caught:
        resolved(tmp_path, CONTAINER, ranks, *overrides)
    assert caught.value.key == key
    assert said in caught.value.message


def test_a_sub_plan_of_a_single_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a single model has no sub-models"):
        resolved(tmp_path, SINGLE, 2, "parallel.fsdp_plan.sub_plans={model: {shard_size: 2}}")


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["parallel.ulysses_parallel_size=2", "parallel.ring_attention_size=2"], 4),
        (["parallel.fsdp_plan.sub_plans={encoder: {shard_size: 4}}"], 4),
        (["parallel.fully_shard_parallel_size=8", "parallel.data_parallel_size=16"], 16),
        (["training.global_batch_size=12", "training.gradient_accumulation_steps=2"], 6),
        (["training.global_batch_size=12", "training.gradient_accumulation_steps=auto"], 1),
    ],
)
def test_the_smallest_world_that_fits(tmp_path: Path, overrides: list[str], ranks: int) -> None:
    config = load_config(write(tmp_path, CONTAINER), overrides, environment=environment(tmp_path))
    assert smallest_world_size(config) == ranks
    resolve(config, ranks)
