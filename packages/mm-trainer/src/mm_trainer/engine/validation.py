"""Validation: a fixed set of samples at fixed σ quantiles, so that two numbers can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from mm_parallel import ParallelMesh
from mm_trainer.engine.conditions import Batch


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Batch], mesh: ParallelMesh) -> dict[str, float]:
    """Mean loss over the set, and per quantile; called on all ranks, equal on all of them.

    Every data rank must bring the same number of batches; ``sample_weight`` (B,) is 0 for samples that only fill up.

    Returns:
        ``loss`` and ``loss_q<quantile>`` for every quantile.
    """
    was_training = model.training
    model.eval()
    sums: dict[float, torch.Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for batch in batches:
        weights = batch.pop("sample_weight")
        losses = model(**batch).per_sample.loss.double().cpu()
        for quantile, loss, weight in zip(batch["quantile"].tolist(), losses, weights.double(), strict=True):
            sums[round(quantile, 6)] += torch.stack([loss * weight, weight])
    model.train(was_training)
    quantiles = sorted(sums)
    table = torch.stack([sums[q] for q in quantiles]).to(mesh.device)
    if dist.is_initialized():
        dist.all_reduce(table)  # the peers of a context-parallel group add the same numbers to both columns
    table = table.cpu()
    figures = {"loss": float(table[:, 0].sum() / table[:, 1].sum())}
    figures.update({f"loss_q{q:g}": float(row[0] / row[1]) for q, row in zip(quantiles, table, strict=True)})
    return figures
