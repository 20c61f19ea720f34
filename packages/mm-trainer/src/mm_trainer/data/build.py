"""From the ``data`` section to loaders: where configuration, models and mesh meet the data layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mm_trainer.contracts.dataset import DatasetContext, MapDataset
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.data.mixing import MixedDataset
from mm_trainer.errors import ConfigError

if TYPE_CHECKING:
    from mm_parallel import ParallelMesh
    from mm_trainer.config import BoundConfig, ResolvedConfig
    from mm_trainer.config.data import DatasetEntry, DatasetParam
    from mm_trainer.contracts.model import Tokenizer

ValidationBatches = Callable[[], Iterator[dict[str, Any]]]


def build_loader(config: ResolvedConfig, bound: BoundConfig, mesh: ParallelMesh) -> BatchLoader:
    """The training batches of this rank."""
    data, training = config.data, config.training
    return BatchLoader(
        open_dataset(data.dataset_param, bound, seed=training.seed),
        micro_batch_size=training.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        accumulation=int(training.gradient_accumulation_steps),
        seed=training.seed,
        shuffle=data.dataloader_param.shuffle,
        workers=worker_options(config),
        on_bad_sample=data.on_bad_sample,
        max_bad_fraction=data.max_bad_fraction,
    )


def build_validation(config: ResolvedConfig, bound: BoundConfig, mesh: ParallelMesh) -> ValidationBatches | None:
    """A function that starts one pass over the validation set; None if there is none."""
    if config.data.val_dataset_param is None:
        return None
    dataset = open_dataset(config.data.val_dataset_param, bound, seed=config.training.seed)

    def batches() -> Iterator[dict[str, Any]]:
        return fixed_batches(
            dataset,
            quantiles=config.training.val_quantiles,
            micro_batch_size=config.training.micro_batch_size,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            workers=worker_options(config),
        )

    return batches


def worker_options(config: ResolvedConfig) -> WorkerOptions:
    """``data.dataloader_param``, with ``pin_memory: auto`` settled."""
    param = config.data.dataloader_param
    pin = torch.accelerator.is_available() if param.pin_memory == "auto" else param.pin_memory
    return WorkerOptions(num_workers=param.num_workers, prefetch_factor=param.prefetch_factor, pin_memory=pin)


def open_dataset(param: DatasetParam, bound: BoundConfig, *, seed: int) -> MapDataset:
    """Open one data set, or a mix of several, for the models of a configuration."""
    if param.datasets is None:
        return _open_single(param, param, bound, seed=seed)
    weighted = [entry.weight for entry in param.datasets if "weight" in entry.model_fields_set]
    return MixedDataset(
        [_open_single(entry, param, bound, seed=seed) for entry in param.datasets],
        repeats=[entry.repeats for entry in param.datasets],
        weights=[entry.weight for entry in param.datasets] if weighted else None,
    )


def _open_single(entry: DatasetEntry, shared: DatasetEntry, bound: BoundConfig, *, seed: int) -> MapDataset:
    """Open one entry; keys it doesn't state come from ``shared``, the section around the list."""
    from mm_trainer.registry import load_dataset_factory

    name = entry.dataset_type or shared.dataset_type
    if name is None:
        raise ConfigError("names no data set type", key="data.dataset_param.dataset_type")
    path = entry.tokenizer or shared.tokenizer
    context = DatasetContext(
        input_spec=_input_spec(bound),
        tokenizer=_build_tokenizer(bound, str(path)) if path is not None else None,
        seed=seed,
    )
    return load_dataset_factory(name)({**shared.extras, **entry.extras}, context)


def _input_spec(bound: BoundConfig) -> InputSpec:
    """What the models ask of a clip, from a build without weights."""
    from mm_trainer.contracts.container import ModelContainer
    from mm_trainer.hub import build_structure

    built = build_structure(bound)
    if isinstance(built.model, ModelContainer):
        return built.model.input_spec()
    return InputSpec.merge(model.input_spec() for model in built.sub_models.values())


def _build_tokenizer(bound: BoundConfig, path: str) -> Tokenizer | None:
    if bound.container_class is not None:
        return bound.container_class.build_tokenizer(bound.model_classes, bound.specs, path)
    ((name, model_class),) = bound.model_classes.items()
    return model_class.build_tokenizer(path, bound.specs[name])
