"""The optimizers that mm-trainer brings along, by the door that others use as well (``mm_trainer.optimizers``)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from mm_trainer.config.resolving import torchao_missing
from mm_trainer.contracts.optimizer import OptimizerRequest, OptimizerSettings, ShardedOptimizer
from mm_trainer.contracts.spec import NoOptions, Options
from mm_trainer.errors import ConfigError
from mm_trainer.optim.low_bit import BlockQuantizer, LowBitAdamW
from mm_trainer.optim.muon import Muon
from mm_trainer.optim.parameters import full_name, match_parameters


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW; its kernels take ``found_inf`` as a gradient scaler would set it."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state tensors of a parameter that hasn't been updated yet, sharded as the parameter is."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }


class HalfPrecisionOptions(Options):
    """What may be allowed by name."""

    half_precision_weights: bool = False
    """Train weights that are stored in bf16 or fp16, although most updates are lost to their rounding."""


class AdamW:
    """``adamw``: torch's own, fused."""

    Options: type[Options] = HalfPrecisionOptions

    def check(self, request: OptimizerRequest) -> None:
        """The weights must be able to hold the updates."""
        _refuse_half_precision(request)

    def build(self, prefix: str, request: OptimizerRequest) -> tuple[ShardedOptimizer, ...]:
        """One optimizer over all parameters."""
        return (_fused(request.parameters[prefix], request),)


class AdamW8Bit:
    """``adamw_8bit``: AdamW with moments of 8 bits, in blocks that share a scale; needs torchao."""

    Options: type[Options] = NoOptions

    def check(self, request: OptimizerRequest) -> None:
        """Refuse to start without torchao."""
        self._quantizer()

    def build(self, prefix: str, request: OptimizerRequest) -> tuple[ShardedOptimizer, ...]:
        """One optimizer over all parameters."""
        return (_low_bit(request.parameters[prefix], request, self._quantizer()),)

    def _quantizer(self) -> BlockQuantizer:
        try:
            return BlockQuantizer()
        except ImportError as error:
            raise torchao_missing(f"which can't be used here ({error})") from error


class StochasticAdamW:
    """``adamw_sr``: AdamW on bf16 weights, which it rounds stochastically."""

    Options: type[Options] = NoOptions

    def check(self, request: OptimizerRequest) -> None:
        """Every trained sub-model must have weights to round."""
        for prefix, own in request.parameters.items():
            if not any(p.dtype == torch.bfloat16 for p in own.values()):
                key = f"model.models.{prefix}.dtype" if prefix else "model.dtype"
                raise ConfigError(
                    f"adamw_sr rounds bf16 parameters stochastically, and {prefix or 'the model'} has none; "
                    f"set {key}: bf16, or take adamw",
                    key="training.optimizer",
                )

    def build(self, prefix: str, request: OptimizerRequest) -> tuple[ShardedOptimizer, ...]:
        """One optimizer over all parameters."""
        return (_low_bit(request.parameters[prefix], request, None),)


class MuonWithAdamW:
    """``muon``: Muon for the matrices of repeated blocks, or those that ``muon_params`` names; AdamW for the rest."""

    Options: type[Options] = HalfPrecisionOptions

    def check(self, request: OptimizerRequest) -> None:
        """There must be such matrices, and the weights must be able to hold the updates."""
        _refuse_half_precision(request)
        self._matrices(request)

    def build(self, prefix: str, request: OptimizerRequest) -> tuple[ShardedOptimizer, ...]:
        """At most one of either."""
        wanted, own = self._matrices(request), request.parameters[prefix]
        matrices = {name: parameter for name, parameter in own.items() if name in wanted}
        others = {name: parameter for name, parameter in own.items() if name not in wanted}
        optimizers: list[ShardedOptimizer] = []
        if matrices:
            settings = request.settings
            optimizers.append(Muon(request.groups(matrices), lr=settings.lr, momentum=settings.muon_momentum))
        if others:
            optimizers.append(_fused(others, request))
        return tuple(optimizers)

    def _matrices(self, request: OptimizerRequest) -> Set[str]:
        """Full names of the matrices that Muon updates, over all sub-models."""
        patterns = request.settings.muon_params
        trained = {name: p for own in request.parameters.values() for name, p in own.items()}
        matrices = {name for name, p in trained.items() if p.ndim == 2}
        if patterns:
            found = match_parameters(list(trained), patterns, key="training.muon_params")
            if not found & matrices:
                raise ConfigError("none of the parameters that this matches is a matrix", key="training.muon_params")
            return found & matrices
        repeated = {
            full_name(prefix, full_name(path, name))
            for prefix, model in request.models.items()
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


def _refuse_half_precision(request: OptimizerRequest) -> None:
    """An update of the size of the learning rate is below the resolution of half-precision weights: 8 bits of bf16 tell
    0.02 from 0.0201, and at a rate of 1e-5 nineteen of twenty weights don't move at all."""
    if request.options.model_dump().get("half_precision_weights"):
        return
    for prefix, own in request.parameters.items():
        for name, parameter in own.items():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                key = f"model.models.{prefix}.dtype" if prefix else "model.dtype"
                kind = str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"the trained weights are {kind} ({name}), whose rounding swallows most updates; set fp32 here "
                    "(parallel.fsdp_plan.param_dtype: bf16 still computes in bf16), or take training.optimizer: "
                    "adamw_sr for bf16 weights; training.optimizer_options.half_precision_weights: true allows it",
                    key=key,
                )


def _adam(settings: OptimizerSettings) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.adam_eps}


def _fused(parameters: Mapping[str, nn.Parameter], request: OptimizerRequest) -> FusedAdamW:
    return FusedAdamW(request.groups(parameters), **_adam(request.settings), fused=True)


def _low_bit(
    parameters: Mapping[str, nn.Parameter], request: OptimizerRequest, quantizer: BlockQuantizer | None
) -> LowBitAdamW:
    return LowBitAdamW(
        request.groups(parameters),
        **_adam(request.settings),
        names={parameter: name for name, parameter in parameters.items()},
        seed=request.settings.seed,
        quantizer=quantizer,
    )
