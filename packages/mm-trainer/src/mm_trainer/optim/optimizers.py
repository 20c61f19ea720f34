"""Optimizers: one set per trainable sub-model, its parameter groups, and its state as flat named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from torch import Tensor, nn

from mm_trainer import registry
from mm_trainer.config import TrainingConfig
from mm_trainer.contracts.optimizer import OptimizerFactory, OptimizerRequest, ShardedOptimizer
from mm_trainer.errors import ConfigError, InputError
from mm_trainer.optim.plan import ParameterPlan


@dataclass(frozen=True)
class NamedOptimizer:
    """The optimizers of one sub-model together with the full names of its parameters.

    Args:
        kind: ``training.optimizer``.
        optimizers: over the trainable parameters of one sub-model, each parameter in one of them.
        names: parameter → full name (``predictor.blocks.0.ffn.0.weight``).
    """

    kind: str
    optimizers: tuple[ShardedOptimizer, ...]
    names: Mapping[Tensor, str]

    def step(self, lr: float, found_inf: Tensor) -> None:
        """Update the parameters and drop the gradients; called on all ranks.

        Args:
            lr: the step's rate; every group scales it by its own factor.
            found_inf: 0-dim float on the device; 1 leaves weights and state alone (see [Note: bad numbers]).
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            optimizer.found_inf = found_inf
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        """Leave out a step that trains other sub-models."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every state tensor under ``<parameter>.<state name>``; hyperparameters stay the configuration's business."""
        return {
            f"{self.names[parameter]}.{key}": value
            for optimizer in self.optimizers
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }

    def allocate_state(self, stored: Iterable[str]) -> dict[str, Tensor]:
        """Create the state tensors that a checkpoint holds, to be filled by it; the optimizer must be fresh.

        torch's own `set_optimizer_state_dict` isn't used: it takes a step on a fresh optimizer to make the state (which
        leaves a counter at 1), and silently restores learning rate and weight decay.

        Args:
            stored: names as `state` gives them, of this optimizer only.

        Returns:
            name → tensor, already part of the optimizer's state.

        Raises:
            InputError: the checkpoint's state is another optimizer's.
        """
        stored_keys: dict[str, set[str]] = {}
        for full_name in stored:
            name, key = full_name.rsplit(".", 1)
            stored_keys.setdefault(name, set()).add(key)
        targets: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = self.names[parameter]
                if name not in stored_keys:
                    continue
                state = optimizer.new_state(parameter)
                if state.keys() != stored_keys[name]:
                    theirs, ours = (", ".join(sorted(keys)) for keys in (stored_keys[name], state))
                    raise InputError(
                        f"the checkpoint's optimizer state of {name} is {theirs}, but training.optimizer: {self.kind} "
                        f"keeps {ours}: was the optimizer changed? "
                        "training.no_load_optim: true resumes with a fresh one"
                    )
                optimizer.state[parameter] = state
                targets |= {f"{name}.{key}": value for key, value in state.items()}
        return targets


def build_optimizers(models: Mapping[str, nn.Module], config: TrainingConfig) -> dict[str, NamedOptimizer]:
    """The optimizers of each sub-model's trainable parameters, as ``training.optimizer`` says.

    Args:
        models: prefix of parameter names (``"predictor"``; empty on the single-model path) → sub-model.
        config: the patterns in it are matched against the full names of all of them together.

    Raises:
        ConfigError: as `check_optimizer`.
    """
    factory, request = _request(models, config)
    return {
        prefix: NamedOptimizer(
            config.optimizer,
            tuple(factory.build(prefix, request)),
            {parameter: name for name, parameter in parameters.items()},
        )
        for prefix, parameters in request.parameters.items()
    }


def check_optimizer(models: Mapping[str, nn.Module], config: TrainingConfig) -> None:
    """Whether ``training.optimizer`` can train these sub-models, which may be on meta.

    Raises:
        ConfigError: a pattern matches nothing, two rules scale one parameter, the optimizer's options are wrong, it
            doesn't suit the parameters, or what it needs isn't installed.
        PluginError: there is no such optimizer.
    """
    _request(models, config)


def _request(models: Mapping[str, nn.Module], config: TrainingConfig) -> tuple[OptimizerFactory, OptimizerRequest]:
    factory = registry.load_optimizer_factory(config.optimizer)
    try:
        options = factory.Options.model_validate(config.optimizer_options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["training.optimizer_options", *map(str, first["loc"])])
        raise ConfigError(f"{first['msg']} (an option of optimizer {config.optimizer})", key=key) from error
    plan = ParameterPlan.of(models, config)
    request = OptimizerRequest(models, plan.parameters, config, options, plan.groups)
    factory.check(request)
    return factory, request
