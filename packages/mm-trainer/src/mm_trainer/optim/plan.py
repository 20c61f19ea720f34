"""What the configuration says of each trainable parameter: weight decay and learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from mm_trainer.config import TrainingConfig
from mm_trainer.errors import ConfigError
from mm_trainer.optim.parameters import full_name, match_parameters


@dataclass(frozen=True)
class ParameterPlan:
    """What the configuration says of each parameter, by full name.

    Args:
        parameters: prefix of a sub-model → its trainable parameters.
        undecayed: without weight decay.
        scales: factors on the learning rate, where they aren't 1.
        weight_decay: of the others than ``undecayed``.
    """

    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    undecayed: Set[str]
    scales: Mapping[str, float]
    weight_decay: float

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], config: TrainingConfig) -> ParameterPlan:
        """Read the configuration for ``models``: prefix of parameter names → sub-model, on meta or not.

        Raises:
            ConfigError: a pattern matches nothing, or two rules scale one parameter.
        """
        parameters = {
            prefix: {full_name(prefix, name): p for name, p in model.named_parameters() if p.requires_grad}
            for prefix, model in models.items()
        }
        names = [name for own in parameters.values() for name in own]
        return cls(
            parameters,
            match_parameters(names, config.no_decay_params, key="training.no_decay_params"),
            _learning_rate_scales(names, config),
            config.weight_decay,
        )

    def groups(self, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups for some of the parameters.

        One per weight decay, learning-rate scale and kind of tensor: torch's foreach and fused kernels refuse a group
        that mixes sharded and plain tensors.
        """
        groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
        for name, parameter in parameters.items():
            decay, scale = 0.0 if name in self.undecayed else self.weight_decay, self.scales.get(name, 1.0)
            group = groups.setdefault(
                (decay, scale, isinstance(parameter, DTensor)), {"params": [], "weight_decay": decay, "lr_scale": scale}
            )
            group["params"].append(parameter)
        return list(groups.values())


def _learning_rate_scales(names: list[str], config: TrainingConfig) -> dict[str, float]:
    scales: dict[str, float] = {}
    for i, rule in enumerate(config.lr_scaling_plan):
        for name in match_parameters(names, rule.apply_modules, key=f"training.lr_scaling_plan.{i}.apply_modules"):
            if name in scales:
                raise ConfigError(f"two rules scale the learning rate of {name}", key=f"training.lr_scaling_plan.{i}")
            scales[name] = rule.scale
    return scales
