"""What happens when a loss or a gradient is not a finite number.

[Note: bad numbers]
The gradient norm is one number, equal on all ranks, and not finite if any gradient isn't. It goes to the optimizer as
``found_inf``, and every optimizer leaves weights and state alone *on the device*: a bad step can't poison a weight, and
the host waits for nothing. The host reads the flags at log steps, before validation and before a save,
on all ranks at the same step, and then stops the run or says what was skipped, as ``training.nan_policy`` wants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mm_trainer.errors import TrainingFault

log = logging.getLogger(__name__)


@dataclass
class _Step:
    number: int
    bad: Tensor
    """0-dim float, 1 where the gradient norm isn't finite; on the device."""
    grad_norm: Tensor
    keys: list[Tensor] = field(default_factory=list)
    """Sample keys per micro-batch, on the host."""
    losses: list[Tensor] = field(default_factory=list)
    """Per-sample losses per micro-batch, on the device."""


class NumberGuard:
    """Remembers the steps since the last check, and judges them.

    Args:
        policy: ``stop`` raises `TrainingFault`; ``skip`` warns and counts.
        describe: sample key → the sample in words, for the message.
    """

    def __init__(self, policy: Literal["stop", "skip"], describe: Callable[[int], str] | None = None) -> None:
        self.policy = policy
        self._describe = describe or (lambda key: f"position {key} of the global data order")
        self.skipped = 0
        """Steps whose update was left out since the start of this process."""
        self._steps: list[_Step] = []
        self._keys: list[Tensor] = []
        self._losses: list[Tensor] = []

    def micro_step(self, sample_key: Tensor, per_sample: Tensor | None) -> None:
        """Note which samples a micro-batch held, and their losses if the model gives them."""
        self._keys.append(sample_key)
        if per_sample is not None:
            self._losses.append(per_sample)

    def step(self, number: int, grad_norm: Tensor) -> Tensor:
        """Close an optimizer step.

        Returns:
            ``found_inf`` for the optimizer: 0-dim float32 on the device, 1 if the update must be left out.
        """
        bad = (~torch.isfinite(grad_norm)).float()
        self._steps.append(_Step(number, bad, grad_norm, self._keys, self._losses))
        self._keys, self._losses = [], []
        return bad

    def check(self) -> None:
        """Judge the steps since the last call; called on all ranks at the same step.

        Raises:
            TrainingFault: a step was bad and the policy is ``stop``; every rank raises, with the same message.
        """
        steps, self._steps = self._steps, []
        if not steps or not bool(torch.stack([step.bad for step in steps]).any()):
            return
        for step in steps:
            if not bool(step.bad):
                continue
            message = (
                f"step {step.number}: the gradient norm is {float(step.grad_norm)}; {self._culprits(step)}. "
                "The update was left out, weights and optimizer are those of the step before"
            )
            if self.policy == "stop":
                raise TrainingFault(f"{message} (training.nan_policy: stop)")
            self.skipped += 1
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning("%s; going on (training.nan_policy: skip)", message)

    def _culprits(self, step: _Step) -> str:
        """Names the samples of all ranks whose loss isn't finite; a collective, reached by all ranks or by none."""
        own: list[int] = []
        for keys, losses in zip(step.keys, step.losses, strict=False):
            own += keys[~torch.isfinite(losses).cpu()].tolist()
        found: list[list[int]] = [own]
        if dist.is_initialized():
            found = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(found, own)
        bad = sorted({key for part in found for key in part})
        if not bad:
            return "every sample's loss is finite, so it arose in the backward"
        shown = "; ".join(map(self._describe, bad[:8])) + ("; …" if len(bad) > 8 else "")
        return f"the loss isn't finite for {shown}"
