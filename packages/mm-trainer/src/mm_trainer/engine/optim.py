"""Optimizers: one per trainable sub-model, its parameter groups, and its state as flat named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from mm_trainer.config import TrainingConfig
from mm_trainer.errors import ConfigError
from mm_trainer.parameters import match_parameters


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer together with the full names of its parameters.

    Args:
        optimizer: over the trainable parameters of one sub-model.
        names: parameter → full name (``predictor.blocks.0.ffn.0.weight``).
    """

    optimizer: Optimizer
    names: Mapping[Tensor, str]

    def step(self, lr: float, found_inf: Tensor) -> None:
        """Update the parameters and drop the gradients.

        Args:
            lr: the step's rate; every group scales it by its own factor.
            found_inf: 0-dim float on the device; 1 leaves weights and moments alone (see [Note: bad numbers]).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # The two attributes by which torch's fused kernels take what a gradient scaler found.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every state tensor under ``<parameter>.<state name>``; hyperparameters stay the configuration's business."""
        return {
            f"{self.names[parameter]}.{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }

    def allocate_state(self, stored: Iterable[str]) -> dict[str, Tensor]:
        """Create the state tensors that a checkpoint holds, to be filled by it; the optimizer must be fresh.

        A tensor shaped like its parameter shares its sharding; a step counter is a scalar where the optimizer wants it.
        torch's own `set_optimizer_state_dict` isn't used: it takes a step on a fresh optimizer to make the state (which
        leaves a counter at 1), and restores learning rate and weight decay without a word.

        Args:
            stored: names as `state` gives them, of this optimizer only.

        Returns:
            name → tensor, already part of the optimizer's state.
        """
        parameters = {name: parameter for parameter, name in self.names.items()}
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        targets = {}
        for full_name in stored:
            name, key = full_name.rsplit(".", 1)
            parameter = parameters[name]
            if key == "step":
                on_device = group_of[parameter].get("fused") or group_of[parameter].get("capturable")
                value = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            else:
                value = torch.zeros_like(parameter, requires_grad=False)
            self.optimizer.state[parameter][key] = value
            targets[full_name] = value
        return targets


def build_optimizers(models: Mapping[str, nn.Module], config: TrainingConfig) -> dict[str, NamedOptimizer]:
    """AdamW over the trainable parameters of each sub-model.

    Groups are formed by weight decay (``no_decay_params``), learning-rate scale (``lr_scaling_plan``) and kind of
    tensor: torch's foreach and fused kernels refuse a group that mixes sharded and plain tensors.

    Args:
        models: prefix of parameter names (``"predictor"``; empty on the single-model path) → sub-model.
        config: the patterns in it are matched against the full names of all of them together.
    """
    named = {
        prefix: {f"{prefix}.{name}" if prefix else name: p for name, p in model.named_parameters() if p.requires_grad}
        for prefix, model in models.items()
    }
    every_name = [name for parameters in named.values() for name in parameters]
    undecayed = match_parameters(every_name, config.no_decay_params, key="training.no_decay_params")
    scales: dict[str, float] = {}
    for i, rule in enumerate(config.lr_scaling_plan):
        for name in match_parameters(every_name, rule.apply_modules, key=f"training.lr_scaling_plan.{i}.apply_modules"):
            if name in scales:
                raise ConfigError(f"two rules scale the learning rate of {name}", key=f"training.lr_scaling_plan.{i}")
            scales[name] = rule.scale
    return {
        prefix: NamedOptimizer(
            AdamW(
                _groups(parameters, undecayed, scales, config.weight_decay),
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.adam_eps,
                fused=True,
            ),
            {parameter: name for name, parameter in parameters.items()},
        )
        for prefix, parameters in named.items()
    }


def _groups(
    parameters: Mapping[str, nn.Parameter], undecayed: Set[str], scales: Mapping[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        decay, scale = 0.0 if name in undecayed else weight_decay, scales.get(name, 1.0)
        key = (decay, scale, isinstance(parameter, DTensor))
        groups.setdefault(key, {"params": [], "weight_decay": decay, "lr_scale": scale})["params"].append(parameter)
    return list(groups.values())
