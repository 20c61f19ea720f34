"""`TrainEngine`: the loop. It knows no model.

It assumes three things of what it trains, and nothing else:

1. ``model(**batch)`` returns an object with ``.loss`` and optionally ``.per_sample``;
2. gradient synchronisation is delegated (``mm_parallel.set_gradient_sync``; no-ops where nothing is sharded);
3. checkpoints go through ``state_dict`` / ``load_state_dict``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm_parallel import ParallelMesh, clip_grad_norm, reset_frozen, reshard, set_gradient_sync
from mm_trainer.config import TrainingConfig
from mm_trainer.engine.conditions import Batch
from mm_trainer.engine.lr import LearningRate
from mm_trainer.engine.metrics import MetricsWriter
from mm_trainer.engine.optim import NamedOptimizer
from mm_trainer.engine.state import CheckpointIO
from mm_trainer.engine.validation import validate
from mm_trainer.errors import TrainingFault
from mm_trainer.hub import BuiltModel

log = logging.getLogger(__name__)

# Read on the host by the draw of noise and sigma; on the device they would cost a synchronisation per batch.
HOST_KEYS = frozenset({"sample_key", "quantile", "sample_weight"})


@dataclass
class Progress:
    """How far a run has come; saved and restored as one."""

    step: int = 0
    """Finished optimizer steps."""
    samples: int = 0
    """Samples of the global batch seen so far."""


class TrainEngine:
    """Runs optimizer steps, logs, validates and saves.

    Args:
        built: the model and its sub-models.
        optimizers: one per trainable sub-model.
        mesh: the ranks.
        config: the resolved ``training`` section.
        learning_rate: schedule over optimizer steps.
        batches: endless iterator over this rank's micro-batches.
        data_state: exact position of the loader, as of the micro-batches that were consumed.
        checkpoints: saves and restores; None if the run saves nothing.
        metrics: where figures go.
        validation: makes the fixed validation batches anew at each call; None without a validation set.
    """

    def __init__(
        self,
        built: BuiltModel,
        *,
        optimizers: Mapping[str, NamedOptimizer],
        mesh: ParallelMesh,
        config: TrainingConfig,
        learning_rate: LearningRate,
        batches: Iterator[Batch],
        data_state: Callable[[], Mapping[str, Any]],
        checkpoints: CheckpointIO | None,
        metrics: MetricsWriter,
        validation: Callable[[], Iterator[Batch]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.built = built
        self.model = built.model
        self.optimizers = optimizers
        self.mesh = mesh
        self.config = config
        self.learning_rate = learning_rate
        self.batches = batches
        self.data_state = data_state
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.validation = validation
        self.progress = progress or Progress()
        self.total_steps = learning_rate.total_steps
        self._accumulation = int(config.gradient_accumulation_steps)
        self._frozen = [m for m in built.sub_models.values() if not any(p.requires_grad for p in m.parameters())]

    def train(self) -> None:
        """Run to the last step: the model is left trained, validated and saved."""
        if self.progress.step == 0:
            self._validate_if_due(force=True)
        window = _Window(self.mesh.device)
        while self.progress.step < self.total_steps:
            loss, grad_norm, lr = self.train_step(window)
            if self.progress.step % self.config.log_interval == 0 or self.progress.step == self.total_steps:
                self._log(window, loss, grad_norm, lr)
                window = _Window(self.mesh.device)
            last = self.progress.step == self.total_steps
            self._validate_if_due(force=last)
            self._save_if_due(force=last)
        if self.checkpoints is not None:
            self.checkpoints.close()

    def train_step(self, window: _Window) -> tuple[Tensor, Tensor, float]:
        """One optimizer step over ``gradient_accumulation_steps`` micro-batches.

        Returns:
            this rank's mean loss (0-dim), the global gradient norm before clipping (0-dim), the learning rate.
        """
        lr = self.learning_rate.at(self.progress.step)
        loss = torch.zeros((), device=self.mesh.device)
        for micro_step in range(self._accumulation):
            started = time.perf_counter()
            batch = next(self.batches)
            window.data_time += time.perf_counter() - started
            set_gradient_sync(self.model, is_last=micro_step == self._accumulation - 1)
            output = self.model(**to_device(batch, self.mesh.device))
            (output.loss / self._accumulation).backward()
            loss += output.loss.detach() / self._accumulation
            window.samples += len(batch["sample_key"]) * self.mesh.data_size
        for frozen in self._frozen:
            reset_frozen(frozen)
        grad_norm = clip_grad_norm(list(self.model.parameters()), self.config.clip_grad)
        self._refuse_bad_numbers(grad_norm)
        for optimizer in self.optimizers.values():
            optimizer.set_lr(lr)
            optimizer.optimizer.step()
            optimizer.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.samples = self.progress.samples + window.samples - window.counted
        window.counted = window.samples
        window.steps += 1
        window.loss += loss
        return loss, grad_norm, lr

    def _refuse_bad_numbers(self, grad_norm: Tensor) -> None:
        """The norm is the same number on all ranks, so all of them stop (or skip) alike."""
        if bool(torch.isfinite(grad_norm)):
            return
        message = f"step {self.progress.step + 1}: the gradient norm is {float(grad_norm)}"
        if self.config.nan_policy == "stop":
            raise TrainingFault(f"{message}; the last checkpoint is from before it (training.nan_policy: stop)")
        log.warning("%s; this step is skipped (training.nan_policy: skip)", message)
        for optimizer in self.optimizers.values():
            optimizer.optimizer.zero_grad(set_to_none=True)

    def _log(self, window: _Window, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        mean = window.loss / window.steps
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        seconds = time.perf_counter() - window.started
        self.metrics.write(
            "train",
            self.progress.step,
            {
                "loss": float(mean),
                "lr": lr,
                "grad_norm": float(grad_norm),
                "samples_per_s": window.samples / seconds,
                "samples": self.progress.samples,
                "step_time_s": seconds / window.steps,
                "data_time_s": window.data_time / window.steps,
            },
        )

    def _validate_if_due(self, *, force: bool) -> None:
        if self.validation is None or not self.config.val_interval:
            return
        if force or self.progress.step % self.config.val_interval == 0:
            batches = (to_device(batch, self.mesh.device) for batch in self.validation())
            figures = validate(self.model, batches, self.mesh)
            for model in self.built.sub_models.values():
                reshard(model)  # without a backward, FSDP2 would leave the roots gathered
            self.metrics.write("validation", self.progress.step, figures)

    def _save_if_due(self, *, force: bool) -> None:
        if self.checkpoints is None:
            return
        if force or self.progress.step % self.config.save_interval == 0:
            self.checkpoints.save(self.progress.step, self.progress.samples, self.data_state())


class _Window:
    """What has been gathered since the last log line; tensors stay on the device until then."""

    def __init__(self, device: torch.device) -> None:
        self.started = time.perf_counter()
        self.steps = 0
        self.samples = 0
        self.counted = 0
        self.data_time = 0.0
        self.loss = torch.zeros((), device=device)


def to_device(batch: Mapping[str, Any], device: torch.device) -> Batch:
    """Move the tensors, nested ones too, except those that the host reads."""
    return {
        key: value
        if key in HOST_KEYS
        else value.to(device, non_blocking=True)
        if isinstance(value, Tensor)
        else to_device(value, device)
        if isinstance(value, Mapping)
        else value
        for key, value in batch.items()
    }
