"""Cross-section rules, and a configuration with every ``auto`` settled for a number of ranks. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace

from mm_parallel.errors import FieldError, PlanError
from mm_parallel.sizes import MeshSizes
from mm_trainer import registry
from mm_trainer.config.schema import ResolvedConfig, TrainerConfig
from mm_trainer.config.sections.training import TrainingConfig
from mm_trainer.config.yaml.diagnose import combine_errors, from_value_error, located
from mm_trainer.config.yaml.document import dotted
from mm_trainer.errors import ConfigError, PluginError, nearest

_OF_A_CONVERSION = ("checkpoint_conversion_dir", "dcp_cache_dir", "dcp_conversion_dir")
_OF_A_SOURCE = ("load_format", *_OF_A_CONVERSION, "allow_missing", "broadcast_from_rank0")


def resolve(config: TrainerConfig, world_size: int) -> ResolvedConfig:
    """Settle ``config`` for ``world_size`` ranks and check the rules that span sections.

    Raises:
        ConfigError: every rule that is broken, with the numbers, file and line.
    """
    broken = [located(config.document, error) for error in _broken_rules(config, world_size)]
    if broken:
        raise combine_errors([*broken, *_suspects(config)])
    try:
        mesh = MeshSizes.resolve(config.parallel, world_size)
    except FieldError as error:
        raise from_value_error(config.document, error, ("parallel",)) from error
    training = _settle_batch(config.training, mesh)
    if isinstance(training, ConfigError):
        raise located(config.document, training)
    parallel = replace(config.parallel, fully_shard_parallel_size=mesh.shard, data_parallel_size=mesh.data)
    sections = {**config.sections(), "parallel": parallel, "training": training}
    return ResolvedConfig(**sections, document=config.document, world_size=world_size, mesh=mesh)


def _suspects(config: TrainerConfig) -> Iterator[ConfigError]:
    """Keys that only a plugin can judge, but that look like ours misspelt: perhaps why a rule is broken."""
    for name, sub in config.model.sub_models.items():
        for key in sub.extras:
            close = nearest(key, type(sub).model_fields, cutoff=0.8)
            if close is not None:
                error = ConfigError(f"is it meant to be {close}?", key=f"{config.model.key_of(name)}.{key}")
                yield located(config.document, error)


def smallest_world_size(config: TrainerConfig) -> int:
    """The fewest ranks that the sizes and the batch of ``config`` are made for; for checks when no number is given."""
    parallel, training = config.parallel, config.training
    context = parallel.ulysses_parallel_size * parallel.ring_attention_size
    if parallel.data_parallel_size is not None:
        return parallel.data_parallel_size * context
    steps, batch = training.gradient_accumulation_steps, training.global_batch_size
    data = 1 if batch is None or steps == "auto" else max(1, batch // (training.micro_batch_size * steps))
    shards = [plan.shard_size or 1 for plan in parallel.fsdp_plan.sub_plans.values()]
    whole = parallel.fully_shard_parallel_size
    return math.lcm(data * context, 1 if whole == "auto" else whole, *shards)


def _settle_batch(training: TrainingConfig, mesh: MeshSizes) -> TrainingConfig | ConfigError:
    """Accumulation and global batch: micro batch × data ranks × accumulation = global batch."""
    per_round = training.micro_batch_size * mesh.data
    formula = f"micro_batch_size {training.micro_batch_size} × data parallel {mesh.data}"
    steps, batch = training.gradient_accumulation_steps, training.global_batch_size
    if steps == "auto":
        assert batch is not None  # the section refuses auto without it
        if batch % per_round:
            return ConfigError(
                f"{batch} can't be reached: {formula} = {per_round} samples per accumulation step doesn't divide it",
                key="training.global_batch_size",
            )
        steps = batch // per_round
    elif batch not in (None, per_round * steps):
        return ConfigError(
            f"expected {formula} × gradient_accumulation_steps {steps} = {per_round * steps}, got {batch}; "
            "correct it, leave it out, or let gradient_accumulation_steps be auto",
            key="training.global_batch_size",
        )
    return training.model_copy(update={"gradient_accumulation_steps": steps, "global_batch_size": per_round * steps})


def _broken_rules(config: TrainerConfig, world_size: int) -> Iterator[ConfigError]:
    yield from _sub_plan_rules(config)
    yield from _unread_source_keys(config)
    if all(sub.freeze is True for sub in config.model.sub_models.values()):
        yield ConfigError("every sub-model is frozen, so there is nothing to train", key="model")
    if config.training.val_interval and config.data.val_dataset_param is None:
        yield ConfigError(
            f"validates every {config.training.val_interval} updates, but data.val_dataset_param is not given",
            key="training.val_interval",
        )
    if not config.training.plugin:  # whose modules may bring optimizers; then it is asked once they are imported
        try:
            registry.find(registry.OPTIMIZERS, config.training.optimizer)
        except PluginError as error:
            yield ConfigError(str(error), key="training.optimizer")
    if config.training.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        yield torchao_missing("which is not installed")
    for tool in ("profile", "memory_profile"):
        window = getattr(config.tools, tool)
        absent = [rank for rank in window.ranks if rank >= world_size]
        if window.enable and absent:
            yield ConfigError(
                f"rank {absent[0]} is not one of the {world_size} ranks (0 to {world_size - 1})",
                key=f"tools.{tool}.ranks",
            )


def _unread_source_keys(config: TrainerConfig) -> Iterator[ConfigError]:
    """Keys that say how weights are read, where none are or not in that way."""
    for name, sub in config.model.sub_models.items():
        has_source = sub.from_pretrained is not None or sub.checkpoint_path is not None
        for field in () if has_source else _OF_A_SOURCE:
            if getattr(sub, field) != type(sub).model_fields[field].default:
                message = "only read with weights, and neither from_pretrained nor checkpoint_path is given"
                yield ConfigError(message, key=f"{config.model.key_of(name)}.{field}")
        for field in _OF_A_CONVERSION if has_source and sub.source.format != "dcp" else ():
            if getattr(sub, field) is not None:
                message = f"only read with load_format: dcp, and it is {sub.load_format}"
                yield ConfigError(message, key=f"{config.model.key_of(name)}.{field}")


def torchao_missing(why: str) -> ConfigError:
    """That an optimizer needs torchao: said here before a run, and by the optimizer if torchao turns out too old."""
    return ConfigError(
        f"adamw_8bit needs torchao, {why}: pip install 'mm-trainer[torchao]', or take adamw", key="training.optimizer"
    )


def _sub_plan_rules(config: TrainerConfig) -> Iterator[ConfigError]:
    """The rules of mm-parallel, asked before anything is built: what is frozen as a whole isn't trained."""
    plan, models = config.parallel.fsdp_plan, config.model.sub_models
    if config.model.models is None:
        for name in plan.sub_plans:
            key = f"parallel.fsdp_plan.sub_plans.{name}"
            yield ConfigError("a single model has no sub-models; set the plan itself", key=key)
        return
    try:
        plan.check_sub_plans({name: sub.freeze is not True for name, sub in models.items()})
    except PlanError as error:
        for fault in (error, *error.also):
            name = str(fault.path[1])
            frozen = f" (model.models.{name}.freeze is true)" if name in models and models[name].freeze is True else ""
            yield ConfigError(f"{fault.message}{frozen}", key=dotted(("parallel", "fsdp_plan", *fault.path)))
