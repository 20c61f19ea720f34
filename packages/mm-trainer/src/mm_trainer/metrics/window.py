"""The figures of the steps since the last log line."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mm_parallel import ParallelMesh, accelerator, count_communication
from mm_trainer.contracts.pipeline import ModelOutput
from mm_trainer.metrics.peaks import peak_tflops
from mm_trainer.metrics.timing import PhaseTimer

SIGMA_BUCKETS = 5
"""Losses are also averaged per fifth of σ: flow-matching losses swing with the noise level, so that only a bucket's
curve shows whether a run is healthy."""


class LogWindow:
    """Gathers on the device what happens between two log lines; the host reads it once, when it is closed.

    Args:
        mesh: the ranks.
        timer: shared with what else times phases, and restarted here; None: one of its own.
        alternating: steps train different sub-models, so figures are wanted for each of them too.
    """

    def __init__(self, mesh: ParallelMesh, *, timer: PhaseTimer | None = None, alternating: bool = False) -> None:
        self._mesh, self._alternating = mesh, alternating
        self.timer = timer or PhaseTimer(mesh.device)
        self.timer.restart()
        self._sent: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._steps: list[_Step] = []
        self._samples = self._tokens = self._flops = 0
        self._buckets = torch.zeros(2, SIGMA_BUCKETS, device=self._mesh.device)

    def add_micro_batch(self, output: ModelOutput, samples: int) -> None:
        """Count a micro-batch of this rank; ``samples``: of all data ranks."""
        self._samples += samples
        self._tokens += output.tokens
        self._flops += output.flops
        if output.per_sample is not None and output.per_sample.sigma is not None:
            index = (output.per_sample.sigma * SIGMA_BUCKETS).long().clamp(0, SIGMA_BUCKETS - 1)
            loss = output.per_sample.loss.float()
            finite = torch.isfinite(loss)
            self._buckets[0].index_add_(0, index, torch.where(finite, loss, 0.0))
            self._buckets[1].index_add_(0, index, finite.float())

    def add_step(self, trained: Sequence[str], loss: Tensor, grad_norm: Tensor) -> None:
        """Close an optimizer step.

        Args:
            trained: the sub-models it updated.
            loss: this rank's mean over its micro-batches (0-dim).
            grad_norm: equal on all ranks (0-dim).
        """
        self._steps.append(_Step("+".join(trained), loss, grad_norm))

    @contextmanager
    def traffic_counted(self) -> Iterator[None]:
        """Count what this rank sends inside, an optimizer step; the figure stands in every window from then on.

        Counting passes every operator through Python, which is too slow for every step.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield
            return
        with count_communication(self._mesh) as counted:
            yield
        self._sent = counted.total().bytes

    def close(self, lr: float) -> dict[str, float]:
        """The window's figures as plain numbers, equal on all ranks; begins the next window. Called on all ranks."""
        losses = torch.stack([step.loss for step in self._steps])
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
            dist.all_reduce(self._buckets)
        wall, phases = self.timer.close()
        steps = len(self._steps)
        figures = {
            "loss": _mean_of_finite(losses),
            "lr": lr,
            "grad_norm": float(self._steps[-1].grad_norm),
            "samples_per_s": self._samples / wall,
            "step_time_s": wall / steps,
        }
        if self._tokens:
            figures["tokens_per_s"] = self._tokens * self._mesh.data_size / wall
        if self._flops:
            # A backward costs twice a forward; what is recomputed isn't counted. This rank's share of its group's work.
            tflops = 3 * self._flops / self._mesh.context_size / wall / 1e12
            figures["tflops_per_rank"] = tflops
            if (peak := peak_tflops(self._mesh.device)) is not None:
                figures["mfu"] = tflops / peak
        figures |= {f"{name}_time_s": seconds / steps for name, seconds in phases.items()}
        figures["waiting_time_s"] = max(0.0, wall - sum(phases.values())) / steps
        if self._sent is not None:
            figures["sent_gib_per_step"] = self._sent / 2**30
        if self._alternating:
            for name in sorted({step.trained for step in self._steps}):
                chosen = [i for i, step in enumerate(self._steps) if step.trained == name]
                figures[f"loss_{name}"] = _mean_of_finite(losses[chosen])
                figures[f"grad_norm_{name}"] = float(self._steps[chosen[-1]].grad_norm)
        figures |= self._by_sigma() | memory_figures()
        self._reset()
        return figures

    def _by_sigma(self) -> dict[str, float]:
        sums, counts = self._buckets.tolist()
        edges = [i / SIGMA_BUCKETS for i in range(SIGMA_BUCKETS)]
        return {f"loss_sigma_{edge:g}": s / n for edge, s, n in zip(edges, sums, counts, strict=True) if n}


def _mean_of_finite(losses: Tensor) -> float:
    """Steps that were skipped count in `skipped_steps`, not here; NaN if there is no other."""
    return float(losses[torch.isfinite(losses)].mean())


@dataclass(frozen=True)
class _Step:
    trained: str
    loss: Tensor
    grad_norm: Tensor


def memory_figures() -> dict[str, float]:
    """Memory of this rank now and at its peak, in GiB: of the device, or of the host process."""
    if accelerator() is not None:
        return {
            "memory_gib": torch.accelerator.memory_allocated() / 2**30,
            "memory_peak_gib": torch.accelerator.max_memory_allocated() / 2**30,
        }
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, and updated a little late
    return {"memory_gib": resident / 2**30, "memory_peak_gib": max(resident, peak) / 2**30}
