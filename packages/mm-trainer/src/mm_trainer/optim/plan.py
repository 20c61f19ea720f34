"""What the configuration says of each trainable parameter: weight decay, learning rate, and which optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mm_trainer.config import TrainingConfig
from mm_trainer.errors import ConfigError
from mm_trainer.optim.parameters import match_parameters


@dataclass(frozen=True)
class OptimizerPlan:
    """What the configuration says of each parameter, by full name.

    Args:
        parameters: prefix of a sub-model → its trainable parameters.
        undecayed: without weight decay.
        scales: factors on the learning rate, where they aren't 1.
        matrices: updated by Muon.
        weight_decay: of the others than ``undecayed``.
    """

    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    undecayed: Set[str]
    scales: Mapping[str, float]
    matrices: Set[str]
    weight_decay: float

    @classmethod
    def of(cls, models: Mapping[str, nn.Module], config: TrainingConfig) -> OptimizerPlan:
        """Read the configuration for ``models``: prefix of parameter names → sub-model, on meta or not.

        Raises:
            ConfigError: a pattern matches nothing, two rules scale one parameter, or the optimizer doesn't suit the
                parameters.
        """
        parameters = {
            prefix: {_full(prefix, name): p for name, p in model.named_parameters() if p.requires_grad}
            for prefix, model in models.items()
        }
        names = [name for own in parameters.values() for name in own]
        if config.optimizer == "adamw_sr":
            _require_bf16(parameters)
        return cls(
            parameters,
            match_parameters(names, config.no_decay_params, key="training.no_decay_params"),
            _learning_rate_scales(names, config),
            _muon_matrices(models, parameters, config) if config.optimizer == "muon" else frozenset(),
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


def _require_bf16(parameters: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
    for prefix, own in parameters.items():
        if not any(p.dtype == torch.bfloat16 for p in own.values()):
            key = f"model.models.{prefix}.dtype" if prefix else "model.dtype"
            raise ConfigError(
                f"adamw_sr rounds bf16 parameters stochastically, and {prefix or 'the model'} has none; "
                f"set {key}: bf16, or take adamw",
                key="training.optimizer",
            )


def _muon_matrices(
    models: Mapping[str, nn.Module], parameters: Mapping[str, Mapping[str, nn.Parameter]], config: TrainingConfig
) -> set[str]:
    """The matrices of the models' repeated blocks, or those that ``training.muon_params`` names."""
    matrices = {name for own in parameters.values() for name, p in own.items() if p.ndim == 2}
    if config.muon_params:
        found = match_parameters(
            [name for own in parameters.values() for name in own], config.muon_params, key="training.muon_params"
        )
        if not found & matrices:
            raise ConfigError("none of the parameters that this matches is a matrix", key="training.muon_params")
        return found & matrices
    repeated = {
        _full(prefix, _full(path, name))
        for prefix, model in models.items()
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, _ in module.named_parameters()
    }
    if not repeated & matrices:
        raise ConfigError(
            "muon updates the matrices of repeated blocks (in an nn.ModuleList), and there is none to train; "
            "name some in training.muon_params, or take adamw",
            key="training.optimizer",
        )
    return repeated & matrices


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
