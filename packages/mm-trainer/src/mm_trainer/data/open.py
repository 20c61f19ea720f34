"""Open the data sets that a configuration names, with what the model asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mm_parallel import accelerator
from mm_trainer import registry
from mm_trainer.contracts.dataset import DatasetContext, MapDataset
from mm_trainer.data.loader import WorkerOptions
from mm_trainer.data.mixing import MixedDataset
from mm_trainer.data.order import SampleTable
from mm_trainer.errors import DataError, PluginError
from mm_trainer.randomness import seed_generators

if TYPE_CHECKING:
    from mm_trainer.config import BoundConfig, ResolvedConfig
    from mm_trainer.config.binding import DatasetBinding
    from mm_trainer.contracts.model import Tokenizer
    from mm_trainer.contracts.spec import InputSpec


def check_agreement(samples: SampleTable, device: torch.device) -> None:
    """Refuse to start if ranks see different data: they would take different numbers of steps and wait forever.

    Raises:
        DataError: with both numbers of samples; on all ranks.
    """
    if not dist.is_initialized():
        return
    mine = torch.tensor([len(samples), samples.digest], dtype=torch.int64, device=device)
    # Both bounds on every rank, so that all of them raise; a rank that went on would hang in the next collective.
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if not torch.equal(least, most):
        raise DataError(
            f"the ranks see different data sets, of {int(least[0])} to {int(most[0])} usable samples "
            f"(here {len(samples)}): is every file readable from every machine?"
        )


def worker_options(config: ResolvedConfig) -> WorkerOptions:
    """``data.dataloader_param``, with ``pin_memory: auto`` settled."""
    param = config.data.dataloader_param
    pin = accelerator() is not None if param.pin_memory == "auto" else param.pin_memory
    return WorkerOptions(num_workers=param.num_workers, prefetch_factor=param.prefetch_factor, pin_memory=pin)


def open_datasets(bindings: Sequence[DatasetBinding], bound: BoundConfig, spec: InputSpec, *, seed: int) -> MapDataset:
    """Open the data set of a section, or the mix of several, for models that ask for clips like ``spec``."""
    opened = [_open(binding, bound, spec, seed=seed) for binding in bindings]
    if len(opened) == 1:
        return opened[0]
    weights = [binding.weight for binding in bindings if binding.weight is not None]  # all have one, or none has
    return MixedDataset(opened, repeats=[binding.repeats for binding in bindings], weights=weights or None)


def _open(binding: DatasetBinding, bound: BoundConfig, spec: InputSpec, *, seed: int) -> MapDataset:
    params = dict(binding.params)
    # Keys of the framework: the factory validates its own only.
    params.pop("dataset_type")
    params.pop("tokenizer")
    context = DatasetContext(input_spec=spec, tokenizer=build_tokenizer(binding, bound), seed=seed)
    seed_generators(seed, binding.key, 0)  # a choice of samples, say, must be the same on all ranks
    with registry.blaming(binding.factory, "opening the data set"):
        dataset = binding.factory(params, context)
    missing = [name for name in ("__len__", "bucket", "tokens", "load") if not callable(getattr(dataset, name, None))]
    if missing:
        raise PluginError(f"{registry.origin(dataset)}: a data set needs {', '.join(missing)}, and has none")
    return dataset


def build_tokenizer(binding: DatasetBinding, bound: BoundConfig) -> Tokenizer | None:
    """The tokenise step of the data set's ``tokenizer`` folder; None if it names none."""
    if binding.params["tokenizer"] is None:
        return None
    path = str(binding.params["tokenizer"])
    if bound.container_class is not None:
        return bound.container_class.build_tokenizer(bound.model_classes, bound.specs, path)
    ((name, model_class),) = bound.model_classes.items()
    return model_class.build_tokenizer(path, bound.specs[name])
