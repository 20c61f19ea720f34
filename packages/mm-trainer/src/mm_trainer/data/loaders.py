"""From the ``data`` section to loaders: where configuration, models and mesh meet the data layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.loader import BatchLoader, fixed_batches, sample_table
from mm_trainer.data.open import check_agreement, open_datasets, worker_options

if TYPE_CHECKING:
    from mm_parallel import ParallelMesh
    from mm_trainer.config import BoundConfig, ResolvedConfig
    from mm_trainer.config.binding import DatasetBinding
    from mm_trainer.contracts.spec import InputSpec

ValidationBatches = Callable[[Sequence[float]], Iterator[dict[str, Any]]]
"""Quantiles of the noise level → this rank's batches, as `fixed_batches` makes them."""


def build_loader(config: ResolvedConfig, bound: BoundConfig, mesh: ParallelMesh, spec: InputSpec) -> BatchLoader:
    """The training batches of this rank.

    Args:
        spec: what the models ask of a clip.
    """
    data, training = config.data, config.training
    loader = BatchLoader(
        _open_section(config, bound, bound.datasets, "train", spec),
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
    check_agreement(loader.order.samples, mesh.device)
    return loader


def build_validation(
    config: ResolvedConfig, bound: BoundConfig, mesh: ParallelMesh, spec: InputSpec
) -> ValidationBatches | None:
    """A function that starts one pass over the validation set; None if there is none."""
    if not bound.val_datasets:
        return None
    dataset = _open_section(config, bound, bound.val_datasets, "validation", spec)
    check_agreement(sample_table(dataset), mesh.device)

    def batches(quantiles: Sequence[float]) -> Iterator[dict[str, Any]]:
        return fixed_batches(
            dataset,
            quantiles=quantiles,
            micro_batch_size=config.training.micro_batch_size,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            workers=worker_options(config),
        )

    return batches


def _open_section(
    config: ResolvedConfig, bound: BoundConfig, bindings: Sequence[DatasetBinding], name: str, spec: InputSpec
) -> MapDataset:
    """The clips of a section, or their conditions from ``data.cache``."""
    if config.data.cache is None:
        return open_datasets(bindings, bound, spec, seed=config.training.seed)
    from mm_trainer.data.cache.recipe import open_cache

    return open_cache(Path(config.data.cache) / name, bindings, bound, spec, seed=config.training.seed)
