"""The conditions cache of a configuration: what it depends on, making it, opening it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_checkpoint import source_digest
from mm_trainer.data.cache.dataset import SETTINGS, UNKNOWN, CachedDataset, read_settings
from mm_trainer.data.cache.legacy import is_of_0_1, weights_as_0_1_stated
from mm_trainer.data.cache.writer import CacheOptions, CacheReport, Encode, write_cache
from mm_trainer.data.open import build_tokenizer, open_datasets, worker_options
from mm_trainer.errors import DataError

if TYPE_CHECKING:
    from mm_checkpoint import WeightSource
    from mm_parallel import ParallelMesh
    from mm_trainer.config import BoundConfig, ResolvedConfig
    from mm_trainer.config.binding import DatasetBinding
    from mm_trainer.contracts.spec import InputSpec, ModelSpec

TRAIN, VALIDATION = "train", "validation"
"""Folders in the cache, one per data set of the configuration."""
NOT_CONDITIONS = frozenset({"data_path", "data_folder", "caption_dropout", "missing_captions"})
"""Keys of a data set that change which samples there are, or what is done after the cache, but no condition."""
PROBE = "A probe:  naïve café, “quoted” &amp;amp; <b>tagged</b>\n\n42 %"
"""Text whose tokens tell one tokenise step, cleaning included, from another."""


def make_cache(
    config: ResolvedConfig,
    bound: BoundConfig,
    mesh: ParallelMesh,
    encode: Encode,
    spec: InputSpec,
    *,
    variants: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, CacheReport]:
    """Write ``data.cache`` for the training set and the validation set; called on all ranks.

    Args:
        config: with ``data.cache``.
        bound: its classes.
        mesh: ranks; those that share a sample encode together and one of them writes.
        encode: the pipeline's conditions of a batch on the CPU.
        spec: what the models ask of a clip.
        variants: crops and captions per sample of the training set.
        progress: see `write_cache`.

    Returns:
        ``train`` and, if there is one, ``validation``.
    """
    if config.data.cache is None:
        raise DataError("data.cache names no folder")
    reports = {}
    for name, bindings in ((TRAIN, bound.datasets), (VALIDATION, bound.val_datasets)):
        if not bindings:
            continue
        folder = Path(config.data.cache) / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Dropout is applied on reading; a cache made with it would freeze one draw.
        plain = [replace(binding, params=_without_dropout(binding.params)) for binding in bindings]
        reports[name] = write_cache(
            folder,
            open_datasets(plain, bound, spec, seed=config.training.seed),
            encode,
            settings=cache_settings(bindings, bound, folder),
            tokenizer=build_tokenizer(bindings[0], bound),
            options=CacheOptions(
                variants=variants if name == TRAIN else 1,
                micro_batch_size=config.training.micro_batch_size,
                workers=worker_options(config),
            ),
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            writes=mesh.context_rank == 0,
            progress=progress,
        )
    return reports


def open_cache(
    folder: Path, bindings: Sequence[DatasetBinding], bound: BoundConfig, spec: InputSpec, *, seed: int
) -> CachedDataset:
    """Open the cache of one of the configuration's data sets, and compare it with what the run would make.

    Raises:
        DataError: it is missing, unfinished or stale.
    """
    read_settings(folder)  # refuses a missing cache before weights are read to compare them with it
    dropout = {float(binding.params.get("caption_dropout", 0.0)) for binding in bindings}
    if len(dropout) > 1:
        raise DataError(f"data.cache: the data sets of a mix must have one caption_dropout, got {sorted(dropout)}")
    return CachedDataset(
        folder,
        dataset=open_datasets(bindings, bound, spec, seed=seed),
        settings=cache_settings(bindings, bound, folder),
        seed=seed,
        caption_dropout=dropout.pop(),
    )


def cache_settings(
    bindings: Sequence[DatasetBinding], bound: BoundConfig, folder: Path | None = None
) -> dict[str, Any]:
    """All that conditions depend on besides the samples; `UNKNOWN` where it isn't known here.

    Args:
        folder: the cache that is made or opened, whose parent keeps the memo that saves reading the weights again.
    """
    data = {
        str(number): {
            name: value for name, value in binding.params.items() if name not in {*NOT_CONDITIONS, "tokenizer"}
        }
        for number, binding in enumerate(bindings)
    }
    tokenizer = build_tokenizer(bindings[0], bound)
    probe = UNKNOWN
    if tokenizer is not None:
        # Compare what the tokenizer does, not where it lies: folders move, and cleaning isn't in its files.
        ids = tokenizer([PROBE])["prompt_ids"].numpy().tobytes()
        probe = hashlib.blake2b(ids, digest_size=8).hexdigest()
    # A single model's encoders are parts of it.
    single = bound.container_class is None
    encoders = {n: _encoder_settings(spec, folder) for n, spec in bound.specs.items() if single or spec.freeze is True}
    return {"data": data, "tokens": probe, "encoders": encoders, "task": bound.task, "container": _container(bound)}


def _container(bound: BoundConfig) -> dict[str, Any]:
    """The pipeline, and what of the container's options changes conditions."""
    if bound.container_class is None:
        return {}
    pipeline, names = bound.pipeline_class, bound.container_class.condition_options
    options = bound.container_options.model_dump(mode="json", include=None if names is None else set(names))
    return {"pipeline": pipeline and f"{pipeline.__module__}.{pipeline.__qualname__}", "options": options}


def _encoder_settings(spec: ModelSpec, folder: Path | None) -> dict[str, Any]:
    weights = UNKNOWN if spec.weights is None else _weights(spec.name, spec.weights, folder)
    return {
        "model_id": spec.model_id,
        "dtype": spec.dtype,
        "architecture": json.dumps(spec.architecture, sort_keys=True),
        "options": spec.options.model_dump(mode="json"),
        "weights": weights,
    }


def _weights(name: str, source: WeightSource, folder: Path | None) -> str:
    """Which weights a source holds; for a cache of version 0.1 in the words of that version."""
    if folder is not None and (folder / SETTINGS).is_file():
        encoders = read_settings(folder).get("settings", {}).get("encoders", {})
        if is_of_0_1(encoders.get(name, {}).get("weights")):
            return weights_as_0_1_stated(source, cache=folder)
    return source_digest(source, beside=folder and folder.parent)


def _without_dropout(params: Mapping[str, Any]) -> dict[str, Any]:
    return {**params, "caption_dropout": 0.0} if "caption_dropout" in params else dict(params)
