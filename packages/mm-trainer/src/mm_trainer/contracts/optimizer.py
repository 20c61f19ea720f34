"""`OptimizerFactory`: what makes the optimizers of a run; registered under ``mm_trainer.optimizers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mm_trainer.contracts.spec import Options


class ShardedOptimizer(Protocol):
    """A torch optimizer that works on sharded parameters and leaves a step out on the device."""

    param_groups: list[dict[str, Any]]
    state: Any
    found_inf: Tensor | None
    """0-dim float on the device; 1 leaves weights and state alone (see [Note: bad numbers])."""

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state tensors of a parameter that hasn't been updated yet, sharded as the parameter is."""


class OptimizerSettings(Protocol):
    """The keys of ``training`` that every optimizer may read."""

    @property
    def lr(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def adam_eps(self) -> float: ...
    @property
    def muon_momentum(self) -> float: ...
    @property
    def muon_params(self) -> tuple[str, ...]: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class OptimizerRequest:
    """What is to be optimized, and how.

    Args:
        models: prefix of parameter names (``"predictor"``; empty on the single-model path) → sub-model.
        parameters: prefix → the sub-model's trainable parameters by full name.
        settings: the ``training`` section.
        options: ``training.optimizer_options``, validated by the factory's own class.
        groups: parameters by full name → parameter groups with ``weight_decay`` and ``lr_scale``. One group never mixes
            sharded and plain tensors, which torch's foreach and fused kernels refuse.
    """

    models: Mapping[str, nn.Module]
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    settings: OptimizerSettings
    options: Options
    groups: Callable[[Mapping[str, nn.Parameter]], list[dict[str, Any]]]


@runtime_checkable
class OptimizerFactory(Protocol):
    """Named by ``training.optimizer``; made without arguments."""

    Options: type[Options]
    """The keys of ``training.optimizer_options``."""

    def check(self, request: OptimizerRequest) -> None:
        """Refuse what can't be trained this way; parameters may be on meta.

        Raises:
            mm_trainer.errors.ConfigError: with the key that is at fault.
        """
        ...

    def build(self, prefix: str, request: OptimizerRequest) -> Sequence[ShardedOptimizer]:
        """The optimizers of one sub-model, after sharding; each of its trainable parameters is in one of them."""
        ...
