"""`GenerativePipeline`: the data flow between the components of a container, in four stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor
from torch.utils._pytree import register_dataclass

from mm_trainer.contracts.model import BaseModel
from mm_trainer.contracts.options import TakesOptions
from mm_trainer.contracts.spec import Options as BaseOptions
from mm_trainer.contracts.spec import OptionsT
from mm_trainer.contracts.step import StepContext
from mm_trainer.errors import ConfigError, InputError

Batch = dict[str, Any]
"""A micro-batch: tensors and lists by name, nested in mappings at most.

Besides what the data set yields, a batch has entries under reserved names:

- ``sample_key`` (B,) int64, on the host: the samples' positions in the global data order, from which all randomness of
  a sample is drawn (`mm_trainer.randomness`). Always there.
- ``quantile`` (B,) float64 in [0, 1), on the host: where in the distribution of noise levels validation wants each
  sample; `mm_trainer.randomness.draw_quantile` honours it. In validation only, and there only for a model whose losses
  follow it.
- ``conditions``: what `prepare_conditions` returned, where it was made beforehand: by condition batching, in a cache,
  or by a data set that yields it.

``sample_weight`` is reserved for validation, which takes it out before the model gets the batch.
"""
Conditions = Mapping[str, Tensor]
Components = Mapping[str, BaseModel]
"""Role → sub-model."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def component(components: Components, role: str, kind: type[ModelT]) -> ModelT:
    """The sub-model in a role, as the class that a pipeline was written for.

    Raises:
        ConfigError: it is another one.
    """
    model = components[role]
    if not isinstance(model, kind):
        raise ConfigError(
            f"the role {role} takes a {kind.__name__} here, got a {type(model).__name__}",
            key=f"model.models.{role}.model_id",
        )
    return model


@runtime_checkable
class PreparesConditions(Protocol):
    """A single model, parts of which are frozen and make conditions, so that `mm-trainer cache` can keep them.

    Its forward takes them as ``conditions``, and makes them itself in a batch without: one from the cache has nothing
    else of what the data set yields.
    """

    def prepare_conditions(self, batch: Batch) -> Conditions:
        """Without gradient and in eval mode; every entry has the batch dim first, and no row depends on another."""
        ...


@dataclass(frozen=True)
class PerSample:
    """Detached per-sample figures for the logs."""

    loss: Tensor
    """(B,) float32, weighted like the batch loss."""
    sigma: Tensor | None = None
    """(B,) float32 in [0, 1]: noise levels; None for a model that has none."""


@dataclass(frozen=True)
class ModelOutput:
    """What `TrainEngine` needs of a forward."""

    loss: Tensor
    """0-dim float32: the mean over the micro-batch."""
    per_sample: PerSample | None = None
    tokens: int = 0
    """Length of all sequences of the micro-batch together, for the logs; 0 if not known."""
    flops: int = 0
    """Floating-point operations of the trained model's forward over the micro-batch; 0 if not known."""

    @classmethod
    def of(cls, output: Any) -> ModelOutput:
        """What any object with ``.loss`` says; what it lacks is not known.

        Raises:
            InputError: it has no ``.loss``, or one that isn't a number.
        """
        if not isinstance(output, cls):
            if not hasattr(output, "loss"):
                kind, inside = type(output).__qualname__, ""
                if isinstance(output, Mapping) and "loss" in output:
                    inside = " with an entry 'loss', which isn't enough: return ModelOutput(loss=...)"
                raise InputError(f"model(**batch) must return an object with .loss, got a {kind}{inside}")
            output = cls(
                output.loss,
                per_sample=getattr(output, "per_sample", None),
                tokens=getattr(output, "tokens", 0),
                flops=getattr(output, "flops", 0),
            )
        loss = output.loss
        if not isinstance(loss, Tensor):
            raise InputError(f"the loss must be a tensor, got a {type(loss).__qualname__}")
        if loss.dim() or not loss.is_floating_point():
            raise InputError(
                f"the loss must be one floating-point number, the mean over the micro-batch, got {loss.dtype} of shape "
                f"{tuple(loss.shape)}"
            )
        return output


@dataclass(frozen=True)
class NoisedInputs:
    """What goes from noising to prediction and loss."""

    noised: Tensor
    """(B, C, F, H, W) float32: x_σ = (1 − σ)·x0 + σ·ε."""
    target: Tensor
    """(B, C, F, H, W) float32: ε − x0."""
    sigma: Tensor
    """(B,) float32."""
    timestep: Tensor
    """(B,) or (B, tokens) float32, 1000·σ; never rounded to a lower precision."""
    weight: Tensor
    """(B,) float32: the loss weight w(t)."""
    conditions: Conditions
    """What `prepare_conditions` returned."""


# FSDP2 looks for tensors in what a root's forward returns, by pytree, and prepares a backward only where it finds some.
register_dataclass(PerSample)
register_dataclass(ModelOutput)


class GenerativePipeline(ABC, TakesOptions[OptionsT]):
    """Owns data flow, not components: a plain object that the container delegates its forward to.

    Every stage is handed the components and a `StepContext`; a pipeline doesn't know its container. Components
    are called through their ``forward``, so that FSDP2's hooks fire. All randomness of a sample is drawn from
    ``batch["sample_key"]`` (see `mm_trainer.randomness`), never from a global generator.
    """

    Options: ClassVar[type[BaseOptions]] = BaseOptions
    """What the container's options must be for this pipeline to read them."""
    clip_entries: ClassVar[tuple[str, ...]] = ()
    """Which entries of clip processors (`ClipProcessor.entries`) it reads."""
    reads_task: ClassVar[bool] = True
    """False: `build` ignores the task, whatever it is."""

    @classmethod
    @abstractmethod
    def build(cls, *, options: OptionsT, components: Components, task: str | None, seed: int) -> Self:
        """Make the pipeline for built components (possibly on meta: read their attributes, not their values).

        Args:
            options: the container's options, as validated.
            components: name → sub-model.
            task: ``model.task`` of the configuration.
            seed: ``training.seed``.
        """

    @abstractmethod
    def prepare_conditions(self, components: Components, context: StepContext, batch: Batch) -> Conditions:
        """Run the frozen encoders, without gradient. Several micro-batches may come stacked as one (condition
        batching), so every entry returned has the batch dim first and no row depends on another."""

    @abstractmethod
    def noising(
        self, components: Components, context: StepContext, conditions: Conditions, batch: Batch
    ) -> NoisedInputs:
        """Draw σ and ε per sample and mix them into the latents."""

    @abstractmethod
    def predict(self, components: Components, context: StepContext, inputs: NoisedInputs) -> Tensor:
        """Run the trained model; returns a tensor shaped like ``inputs.target``."""

    @abstractmethod
    def compute_loss(self, prediction: Tensor, inputs: NoisedInputs) -> ModelOutput:
        """Reduce prediction and target to the loss, in float32."""

    def forward(self, components: Components, context: StepContext, **batch: Any) -> ModelOutput:
        """The four stages in order; conditions that condition batching already made are used as they are."""
        context = replace(context, inside_forward=True)
        conditions = batch.get("conditions")
        if conditions is None:
            with context.phase("conditions"):
                conditions = self.prepare_conditions(components, context, batch)
        inputs = self.noising(components, context, conditions, batch)
        output = self.compute_loss(self.predict(components, context, inputs), inputs)
        tokens, flops = self.work(components, inputs)
        return replace(output, tokens=tokens, flops=flops)

    def work(self, components: Components, inputs: NoisedInputs) -> tuple[int, int]:
        """Tokens and forward FLOPs of a micro-batch, for the logs; 0 where they aren't known."""
        return 0, 0

    def describe(self) -> dict[str, Any]:
        """Plain values printed at start and stored in the checkpoint's manifest (schedule preset and its numbers)."""
        return {}
