"""``mm-trainer cache``: run the frozen encoders over the data sets once, on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from mm_parallel import ParallelMesh, reset_frozen
from mm_trainer.commands.prepare import Prepared
from mm_trainer.config import BoundConfig
from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.pipeline import Conditions, PreparesConditions
from mm_trainer.contracts.step import StepContext
from mm_trainer.data.batch import Batch, to_device
from mm_trainer.data.cache.recipe import make_cache
from mm_trainer.data.cache.writer import CacheReport
from mm_trainer.engine.build import BuiltModel, build_model
from mm_trainer.errors import ConfigError
from mm_trainer.launch.process import pick_device, process_group, set_up_logging
from mm_trainer.launch.rank import RankEnvironment
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Seconds between two lines on how far it is."""


def cache(prepared: Prepared, *, variants: int = 1) -> int:
    """Write the cache that ``data.cache`` names; called once in every rank's process.

    Args:
        variants: crops and captions per sample of the training set.

    Returns:
        the exit code, 0.
    """
    environment = RankEnvironment.read()
    rank = environment or RankEnvironment()
    set_up_logging(rank.rank)
    config, device_type = prepared.config, pick_device(rank.local_rank)
    with process_group(environment, device_type, timeout_s=config.parallel.timeout_s):
        reports = write_caches(prepared, ParallelMesh.build(config.mesh, device_type=device_type), variants)
    for name, report in reports.items():
        log.info("%s: %s", name, report)
    return 0


def write_caches(prepared: Prepared, mesh: ParallelMesh, variants: int = 1) -> dict[str, CacheReport]:
    """Build the encoders only (what is trained stays on meta) and write the caches; the process group is initialised.

    Raises:
        ConfigError: no folder is named, or the model makes no conditions.
    """
    config, bound = prepared.config, prepared.bound
    if config.data.cache is None:
        raise ConfigError("names no folder to write to", key="data.cache")
    single = bound.container_class is None
    built = build_model(
        _conditions_only(bound) if single else bound,
        mesh,
        structure=None if single else prepared.structure,
        plan=config.parallel.fsdp_plan,
        features=config.features,
        seed=config.training.seed,
        unused=() if single else [name for name in bound.specs if name not in bound.frozen],
    )
    prepare_conditions = _maker(built, bound)

    @torch.no_grad()
    def encode(batch: Mapping[str, Any]) -> Mapping[str, Tensor]:
        seed_generators(config.training.seed, "conditions", int(batch["sample_key"][0]), mesh.device)
        conditions = prepare_conditions(to_device(batch, mesh.device))
        for encoder in built.frozen:
            reset_frozen(encoder)
        return {name: value.cpu() for name, value in conditions.items()}

    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if mesh.rank == 0 and (done == total or time.monotonic() - said > PROGRESS_S):
            said = time.monotonic()
            log.info("%d of %d micro-batches of this rank encoded", done, total)

    return make_cache(config, bound, mesh, encode, built.model.input_spec(), variants=variants, progress=progress)


def _maker(built: BuiltModel, bound: BoundConfig) -> Callable[[Batch], Conditions]:
    """What makes the conditions of a batch on the device."""
    model = built.model
    if not isinstance(model, ModelContainer):
        model.eval()
        return lambda batch: cast("Conditions", model(**batch))
    pipeline = model.pipeline
    if pipeline is None or not bound.frozen:
        raise ConfigError("there is nothing to cache: no sub-model is frozen, or there is no pipeline", key="model")
    return lambda batch: pipeline.prepare_conditions(built.sub_models, StepContext(), batch)


def _conditions_only(bound: BoundConfig) -> BoundConfig:
    """With a frozen single model whose forward makes its conditions: FSDP2, and the casts, act in forwards only."""
    ((name, kind),) = bound.model_classes.items()
    if not issubclass(kind, PreparesConditions):
        raise ConfigError(
            f"there is nothing to cache: {kind.__name__} has no prepare_conditions, which a model without a container "
            "makes its conditions by",
            key="model",
        )

    def forward(self: Any, **batch: Any) -> Conditions:
        conditions: Conditions = self.prepare_conditions(batch)
        return conditions

    return replace(
        bound,
        model_classes={name: type(kind.__name__, (kind,), {"forward": forward})},
        specs={name: replace(bound.specs[name], freeze=True)},
    )
