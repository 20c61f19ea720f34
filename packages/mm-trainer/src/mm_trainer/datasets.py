"""From the bound configuration to the loader of this rank and to its validation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mm_parallel import ParallelMesh
from mm_trainer.config import BoundConfig, DataLoaderParam, DatasetBinding, ResolvedConfig
from mm_trainer.contracts.dataset import DatasetContext, MapDataset
from mm_trainer.contracts.model import Tokenizer
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.errors import ConfigError

Batch = dict[str, Any]


def make_loader(config: ResolvedConfig, bound: BoundConfig, spec: InputSpec, mesh: ParallelMesh) -> BatchLoader:
    """The training batches of this rank; peers of a context-parallel group get the same ones."""
    training, data = config.training, config.data
    return BatchLoader(
        make_dataset(bound, bound.datasets, spec, seed=training.seed),
        micro_batch_size=training.micro_batch_size,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        accumulation=int(training.gradient_accumulation_steps),
        seed=training.seed,
        shuffle=data.dataloader_param.shuffle,
        workers=worker_options(data.dataloader_param),
        on_bad_sample=data.on_bad_sample,
        max_bad_fraction=data.max_bad_fraction,
    )


def make_validation(
    config: ResolvedConfig, bound: BoundConfig, spec: InputSpec, mesh: ParallelMesh
) -> Callable[[], Iterator[Batch]] | None:
    """Makes the fixed validation batches anew at every call; None if the run validates nothing."""
    training = config.training
    if not training.val_interval:
        return None
    dataset = make_dataset(bound, bound.val_datasets, spec, seed=training.seed)

    def batches() -> Iterator[Batch]:
        fixed = fixed_batches(
            dataset,
            quantiles=training.val_quantiles,
            micro_batch_size=training.micro_batch_size,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
        )
        for batch, weight in fixed:
            yield {**batch, "sample_weight": weight}

    return batches


def make_dataset(bound: BoundConfig, bindings: Sequence[DatasetBinding], spec: InputSpec, *, seed: int) -> MapDataset:
    """The data set of a binding."""
    if len(bindings) > 1:
        raise ConfigError("mixing several data sets isn't available yet", key=bindings[1].key)
    (binding,) = bindings
    params = dict(binding.params)
    del params["dataset_type"]
    tokenizer_path = params["tokenizer"]
    if tokenizer_path is None:
        del params["tokenizer"]  # a factory without this key needn't know it
    context = DatasetContext(spec, make_tokenizer(bound, tokenizer_path), seed)
    return binding.factory(params, context)


def make_tokenizer(bound: BoundConfig, path: Any) -> Tokenizer | None:
    """The tokenise step of the model that reads text, if the data set names a tokenizer folder."""
    if path is None:
        return None
    if bound.container_class is None:
        (spec,) = bound.specs.values()
        return bound.model_classes[spec.name].build_tokenizer(str(path), spec)
    return bound.container_class.build_tokenizer(bound.model_classes, bound.specs, str(path))


def worker_options(param: DataLoaderParam) -> WorkerOptions:
    """``data.dataloader_param`` with ``pin_memory: auto`` settled."""
    pin = torch.accelerator.is_available() if param.pin_memory == "auto" else param.pin_memory
    return WorkerOptions(num_workers=param.num_workers, prefetch_factor=param.prefetch_factor, pin_memory=pin)
