"""`TrainEngine`: the loop. It has no knowledge of any model.

It assumes three things of what it trains, and nothing else:

1. ``model(**batch)`` returns an object with ``.loss`` and optionally ``.per_sample``: any object, which becomes a
   `ModelOutput` before FSDP2 sees it;
2. gradient synchronisation is delegated: a model that brings its own is asked, all others get mm-parallel's (no-ops
   where nothing is sharded), see `mm_trainer.engine.sync`;
3. checkpoints go through ``state_dict`` / ``load_state_dict``.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mm_parallel import ParallelMesh, clip_grad_norm, reset_frozen
from mm_trainer.config import TrainingConfig
from mm_trainer.data.batch import Batch, to_device
from mm_trainer.engine.checkpoint import CheckpointIO, Progress
from mm_trainer.engine.coverage import GradientCoverage
from mm_trainer.engine.forward import Forward
from mm_trainer.engine.guard import NumberGuard
from mm_trainer.engine.replicas import check_replicas
from mm_trainer.engine.signals import Request, RequestWatcher
from mm_trainer.engine.stepping import Stepping
from mm_trainer.engine.sync import announce, gradient_sync_of
from mm_trainer.engine.validation import Validation
from mm_trainer.engine.watchdog import watchdog
from mm_trainer.metrics.profiling import ProfileWindows
from mm_trainer.metrics.timing import PhaseTimer
from mm_trainer.metrics.window import LogWindow
from mm_trainer.metrics.writer import MetricsWriter
from mm_trainer.optim.ema import WeightAverage
from mm_trainer.optim.lr import LearningRate
from mm_trainer.optim.optimizers import NamedOptimizer
from mm_trainer.randomness import seed_generators

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What surrounds the loop; each is a small object with one job.

    Args:
        data_state: exact position of the loader, as of the micro-batches that were consumed.
        describe_sample: sample key → the sample in words.
        checkpoints: saves the run; None if nothing is saved (a dry run).
        metrics: where figures go.
        requests: stop and save requests from outside.
        profiles: recordings of a few steps.
        validation: makes the fixed validation batches, at the given quantiles, anew at each call; None without a
            validation set.
        stepping: which sub-models a step trains.
        timer: times the phases of a step; given when something inside the model's forward times its own phases. None:
            the loop makes one.
        ema: running average of the trained weights.
    """

    data_state: Callable[[], Mapping[str, Any]]
    checkpoints: CheckpointIO | None
    metrics: MetricsWriter
    requests: RequestWatcher
    profiles: ProfileWindows
    validation: Callable[[Sequence[float]], Iterator[Batch]] | None = None
    describe_sample: Callable[[int], str] | None = None
    stepping: Stepping = field(default_factory=Stepping)
    timer: PhaseTimer | None = None
    ema: WeightAverage | None = None


class TrainEngine:
    """Runs optimizer steps, logs, validates and saves.

    Args:
        model: any module that meets the three assumptions.
        frozen: its sub-models that have nothing to train.
        optimizers: one per trainable sub-model.
        mesh: the ranks.
        config: the resolved ``training`` section.
        learning_rate: schedule over optimizer steps.
        batches: endless iterator over this rank's micro-batches.
        services: what surrounds the loop.
        progress: where the run stands; advanced in place.
        last_step: last step of this process; default: the schedule's last.
        reduce_every_micro_step: see `mm_parallel.set_gradient_sync`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        frozen: Sequence[nn.Module] = (),
        optimizers: Mapping[str, NamedOptimizer],
        mesh: ParallelMesh,
        config: TrainingConfig,
        learning_rate: LearningRate,
        batches: Iterator[Batch],
        services: Services,
        progress: Progress,
        last_step: int | None = None,
        reduce_every_micro_step: bool = False,
    ) -> None:
        self.model, self._frozen = model, frozen
        self._sync = gradient_sync_of(model)
        self._forward = Forward(model)
        self.optimizers, self.mesh, self.config = optimizers, mesh, config
        self.learning_rate = learning_rate
        self.total_steps = learning_rate.total_steps if last_step is None else last_step
        self.batches, self.services, self.progress = batches, services, progress
        self.reduce_every_micro_step = reduce_every_micro_step
        self.guard = NumberGuard(config.nan_policy, services.describe_sample)
        self._coverage = GradientCoverage()
        self._validation: Validation | None = None
        if services.validation is not None:
            self._validation = Validation(model, services.validation, mesh, config.val_quantiles, seed=config.seed)
        self._accumulation = int(config.gradient_accumulation_steps)

    def train(self) -> None:
        """Run to the last step, or to a stop request. The run is saved, and validated if it reached its end."""
        gc.disable()  # ranks that collect at different steps stall all the others
        try:
            with self.services.requests.installed():
                self._run()
        finally:
            gc.enable()
            # In `finally`, so that a recording survives a step that fails.
            self.services.profiles.close(self.progress.step)
        if self.services.checkpoints is not None:
            # Only after a clean end: closing waits for the background save,
            # which may never end once a rank has failed.
            self.services.checkpoints.close()

    def _run(self) -> None:
        if self.progress.step >= self.total_steps:
            log.info("nothing to do: %d of %d steps are done", self.progress.step, self.total_steps)
            return
        check_replicas(self.model)
        if self.progress.step == 0:
            self._validate()
            if self.services.requests.poll().stop:
                log.info("asked to stop: ended before the first step")
                return
        self.run_steps()

    def run_steps(self) -> None:
        """The loop itself, up to the last step or a stop request; `train` is what surrounds it."""
        window = LogWindow(self.mesh, timer=self.services.timer, alternating=self.services.stepping.alternates)
        timer = window.timer
        first = self.progress.step + 1
        while self.progress.step < self.total_steps:
            step = self.progress.step + 1
            self.services.profiles.before(step)
            # The first step allocates what later ones reuse (FSDP2's buffers, optimizer state); the second is typical.
            counted = window.traffic_counted() if step == first + 1 else nullcontext()
            with watchdog(self.config.step_timeout_s or 0), counted:
                lr = self.train_step(window)
            if step == first:
                check_replicas(self.model, parameters=False)  # statistics of a rank's own samples, say
            self.services.profiles.after(step)
            request = self.services.requests.poll()
            last = step == self.total_steps
            if step % self.config.log_interval == 0 or last or request.stop:
                self.guard.check()
                self._log(window, lr)
            # By step count, so that all ranks collect in the same step.
            if step % self.config.gc_interval == 0:
                gc.collect()
            if last or (self.config.val_interval and step % self.config.val_interval == 0):
                with timer.phase("validation"):
                    self._validate()
            with timer.phase("save"):
                self._save_if_due(request, last=last)
            if request.stop and not last:
                log.info("asked to stop: ended after step %d of %d", step, self.total_steps)
                return

    def train_step(self, window: LogWindow) -> float:
        """One optimizer step over ``gradient_accumulation_steps`` micro-batches; returns its learning rate."""
        step, timer = self.progress.step, window.timer
        lr = self.learning_rate.at(step)
        trained = self.services.stepping.begin(step, list(self.optimizers))
        loss = torch.zeros((), device=self.mesh.device)
        for micro_step in range(self._accumulation):
            loss += self._micro_step(window, is_last=micro_step == self._accumulation - 1)
        self._coverage.check(trained, self.optimizers)
        with timer.phase("optimizer"):
            for frozen in self._frozen:
                # Frozen units get no backward, in which FSDP2 would free what the forward gathered.
                reset_frozen(frozen)
            # Before clipping: gradients of a sub-model that this step doesn't update must not count in the norm.
            for name in self.optimizers.keys() - set(trained):
                self.optimizers[name].drop_gradients()
            grad_norm = clip_grad_norm(self.model.parameters(), self.config.clip_grad or None)
            found_inf = self.guard.step(step + 1, grad_norm)
            for name in trained:
                self.optimizers[name].step(lr, found_inf)
            if self.services.ema is not None:
                self.services.ema.update(trained, skipped=found_inf)
        self.progress.step += 1
        window.add_step(trained, loss, grad_norm)
        return lr

    def _micro_step(self, window: LogWindow, *, is_last: bool) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's loss (0-dim)."""
        timer = window.timer
        with timer.phase("data"):
            batch = next(self.batches)
        # Only now: the loader and the encoders ahead of it draw, too.
        seed_generators(self.config.seed, "step", int(batch["sample_key"][0]), self.mesh.device)
        announce(self._sync, is_last=is_last, reduce_every_micro_step=self.reduce_every_micro_step)
        with timer.phase("forward"):
            output = self._forward(to_device(batch, self.mesh.device))
        with timer.phase("backward"):
            # A loss that isn't finite may have finite gradients. Marking it with NaN carries it into
            # the gradient norm on every rank, which the guard and the optimizers rely on, without a host sync.
            # Multiplying by 1 changes no bit of the other losses.
            mark = torch.where(torch.isfinite(output.loss.detach()), 1.0, math.nan)
            (output.loss * mark / self._accumulation).backward()
        self.guard.micro_step(batch["sample_key"], None if output.per_sample is None else output.per_sample.loss)
        samples = len(batch["sample_key"]) * self.mesh.data_size
        window.add_micro_batch(output, samples)
        self.progress.samples += samples
        return output.loss.detach() / self._accumulation

    def _log(self, window: LogWindow, lr: float) -> None:
        figures = window.close(lr)
        figures["samples"] = self.progress.samples
        if self.guard.skipped:
            figures["skipped_steps"] = self.guard.skipped
        self.services.metrics.write("train", self.progress.step, figures)

    def _validate(self) -> None:
        if self._validation is None:
            return
        figures: dict[str, float] = {}
        for view in self.services.stepping.views():
            found = self._validation.measure(view, trained=self.progress.step > 0)
            figures |= {f"{view}/{name}" if view else name: value for name, value in found.items()}
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward, FSDP2 would leave trained roots gathered
        self.services.metrics.write("validation", self.progress.step, figures)

    def _save_if_due(self, request: Request, *, last: bool) -> None:
        step, interval = self.progress.step, self.config.save_interval
        due = last or request.save or request.stop or (interval and step % interval == 0)
        if self.services.checkpoints is None or not due:
            return
        self.guard.check()  # a bad state never replaces a good checkpoint
        self.services.checkpoints.save(self.progress, self.services.data_state())
