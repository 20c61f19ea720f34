"""Validation: a fixed set of samples at fixed σ quantiles, so that two numbers can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mm_parallel import ParallelMesh
from mm_trainer.contracts.pipeline import ModelOutput
from mm_trainer.data.batch import Batch
from mm_trainer.errors import InputError


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[Batch], mesh: ParallelMesh, quantiles: Sequence[float]
) -> dict[str, float]:
    """Mean loss over the set, and per quantile; called on all ranks, equal on all of them.

    Every data rank must bring the same number of batches; ``sample_weight`` (B,) is 0 for samples that only fill up.

    Args:
        model: returns the loss of every sample.
        batches: this rank's.
        mesh: the ranks.
        quantiles: all that a sample's ``quantile`` may be; a rank may see some of them only.

    Returns:
        ``loss`` and ``loss_q<quantile>`` for every quantile.
    """
    was_training = model.training
    model.eval()
    row = {quantile: number for number, quantile in enumerate(sorted(set(quantiles)))}
    table = torch.zeros(len(row), 2, dtype=torch.float64)
    for batch in batches:
        weights = batch.pop("sample_weight")
        per_sample = ModelOutput.of(model(**batch)).per_sample
        if per_sample is None:
            raise InputError("validation needs the losses of single samples: the model's output has no per_sample")
        losses = per_sample.loss.double().cpu()
        for quantile, loss, weight in zip(batch["quantile"].tolist(), losses, weights.double(), strict=True):
            table[row[quantile]] += torch.stack([loss * weight, weight])
    model.train(was_training)
    table = table.to(mesh.device)
    if dist.is_initialized():
        dist.all_reduce(table)  # the peers of a context-parallel group add the same numbers to both columns
    table = table.cpu()
    figures = {"loss": float(table[:, 0].sum() / table[:, 1].sum())}
    figures.update({f"loss_q{quantile:g}": float(table[n, 0] / table[n, 1]) for quantile, n in row.items()})
    return figures
