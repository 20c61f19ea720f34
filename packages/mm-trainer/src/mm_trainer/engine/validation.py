"""Validation: a fixed set of samples at fixed quantiles of the noise level, so that two numbers can be compared."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mm_parallel import ParallelMesh
from mm_trainer.contracts.pipeline import ModelOutput, PerSample
from mm_trainer.data.batch import Batch, to_device
from mm_trainer.errors import InputError
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)


class Validation:
    """Mean losses over a fixed set, in eval mode and without gradients.

    [Note: quantiles that nobody reads] A loss at a quantile means something only if the model noises its samples by
    the batch's ``quantile``. So before the first figures, one batch is run twice with nothing changed but the
    quantiles. A model whose outputs stay the same to the bit, on all ranks, has no noise levels, or draws them past us;
    its samples are then seen once each, without a quantile.

    Args:
        model: returns the loss of every sample.
        batches: quantiles → this rank's batches, anew at each call; every data rank must bring the same number, and
            ``sample_weight`` (B,) is 0 for samples that only fill up.
        mesh: the ranks.
        quantiles: at which every sample is measured.
        seed: the run's seed, by which the global generators are set before each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[Sequence[float]], Iterator[Batch]],
        mesh: ParallelMesh,
        quantiles: Sequence[float],
        *,
        seed: int,
    ) -> None:
        self.model, self.mesh, self.quantiles, self.seed = model, mesh, quantiles, seed
        self._make_batches = batches
        self._follows: dict[str, bool] = {}
        """View → whether the model's losses follow the quantile, where that is settled."""

    @torch.no_grad()
    def measure(self, view: str = "", *, trained: bool = True) -> dict[str, float]:
        """The figures of one view of the model, see `Alternation.views`; called on all ranks, equal on all of them.

        Args:
            view: its name.
            trained: False before the first step, when a model whose last layer begins with zeros may return the same
                whatever its input is: that it doesn't follow the quantile is then asked again next time.

        Returns:
            ``loss``, and ``loss_q<quantile>`` for every quantile if the losses follow it.
        """
        was_training = self.model.training
        self.model.eval()
        quantiles, batches = self._batches(view, trained=trained)
        table = self._losses(batches, quantiles)
        self.model.train(was_training)
        figures = {"loss": float(table[:, 0].sum() / table[:, 1].sum())}
        figures.update({f"loss_q{q:g}": float(table[n, 0] / table[n, 1]) for n, q in enumerate(quantiles)})
        return figures

    def _batches(self, view: str, *, trained: bool) -> tuple[Sequence[float], Iterable[Batch]]:
        """The quantiles to measure at, in ascending order, and the batches."""
        quantiles = sorted(set(self.quantiles))
        if not takes(self.model, "quantile") or self._follows.get(view) is False:
            return (), self._on_device(())
        batches = self._on_device(quantiles)
        if self._follows.get(view):
            return quantiles, batches
        first = next(batches)
        follows = self._follows_quantile(first)
        if follows or trained:
            self._follows[view] = follows
        if follows:
            return quantiles, chain([first], batches)
        log.info(
            "validation%s: the losses don't follow the batch's quantile, so there are no losses by quantile and each "
            "sample is measured once (a model with noise levels takes them from mm_trainer.randomness.draw_quantile)",
            f" of {view}" if view else "",
        )
        return (), self._on_device(())

    def _on_device(self, quantiles: Sequence[float]) -> Iterator[Batch]:
        return (to_device(batch, self.mesh.device) for batch in self._make_batches(quantiles))

    def _follows_quantile(self, batch: Batch) -> bool:
        """Whether outputs change with the quantiles alone; the same answer on all ranks."""
        moved = {**batch, "quantile": (batch["quantile"] + 0.5) % 1.0}
        outputs = []
        for variant in (batch, moved):
            own = tree_map_only(Tensor, Tensor.clone, variant)  # a forward may write into its inputs
            own.pop("sample_weight")
            outputs.append(self._per_sample(own))
        first, second = outputs
        # σ too: the loss of a flow-matching model that still predicts zeros is the same at every σ.
        follows = not (_same(first.loss, second.loss) and _same(first.sigma, second.sigma))
        answer = torch.tensor(int(follows), device=self.mesh.device)
        if dist.is_initialized():
            dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return bool(answer)

    def _losses(self, batches: Iterable[Batch], quantiles: Sequence[float]) -> Tensor:
        """(quantiles or 1, 2) float64 on the CPU: sums over all ranks of weighted losses and of weights."""
        row = {quantile: number for number, quantile in enumerate(quantiles)}
        table = torch.zeros(len(row) or 1, 2, dtype=torch.float64)
        for batch in batches:
            weights = batch.pop("sample_weight").double()
            losses = self._per_sample(batch).loss.double().cpu()
            rows = [row[quantile] for quantile in batch["quantile"].tolist()] if row else [0] * len(weights)
            for number, loss, weight in zip(rows, losses, weights, strict=True):
                table[number] += torch.stack([loss * weight, weight])
        table = table.to(self.mesh.device)
        if dist.is_initialized():
            dist.all_reduce(table)  # the peers of a context-parallel group add the same numbers to both columns
        return table.cpu()

    def _per_sample(self, batch: Batch) -> PerSample:
        seed_generators(self.seed, "validation", int(batch["sample_key"][0]), self.mesh.device)
        per_sample = ModelOutput.of(self.model(**batch)).per_sample
        if per_sample is None:
            raise InputError("validation needs the losses of single samples: the model's output has no per_sample")
        return per_sample


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has a parameter of this name, or takes any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal bit for bit, NaN included."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
