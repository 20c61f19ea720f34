"""Options that no consumer of a run reads: refused before it starts, since they would change nothing in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from mm_trainer.contracts.container import ModelContainer
from mm_trainer.contracts.model import BaseModel
from mm_trainer.contracts.spec import ModelSpec
from mm_trainer.errors import ConfigError

if TYPE_CHECKING:
    from mm_trainer.config import BoundConfig, ResolvedConfig
    from mm_trainer.config.binding import DatasetBinding

MODEL_OPTIONS = ("architecture", "attn_implementation")
"""Keys of every sub-model that only its own class can act on."""


@runtime_checkable
class AddsEntries(Protocol):
    """A data set factory with options that add entries to a sample, each for models that declare it only."""

    def optional_entries(self, params: Mapping[str, Any]) -> Mapping[str, Iterable[str]]:
        """Option that is given → the entries that it adds."""


class WatchedSpec(ModelSpec[Any]):
    """A `ModelSpec` that knows which of its fields were read."""

    @classmethod
    def of(cls, spec: ModelSpec[Any]) -> Self:
        """A copy that nothing has been read of."""
        watched = object.__new__(cls)
        watched.__dict__.update(vars(spec), _read=set())
        return watched

    def was_read(self, field: str) -> bool:
        """Whether anything read the field, by its name or with all others at once (a copy, say)."""
        return not {field, "__dict__"}.isdisjoint(object.__getattribute__(self, "__dict__")["_read"])

    def __getattribute__(self, name: str) -> Any:
        # A copy by `dataclasses.replace` has no record; making it read every field of this one.
        read = object.__getattribute__(self, "__dict__").get("_read")
        if read is not None:
            read.add(name)
        return super().__getattribute__(name)


def check_model_options(bound: BoundConfig, specs: Mapping[str, WatchedSpec]) -> None:
    """Refuse a task, or a sub-model's shapes or attention kernel, that nothing read.

    Args:
        bound: the classes.
        specs: what the sub-models were built from.

    Raises:
        ConfigError: with the key.
    """
    for name, spec in bound.specs.items():
        kind = bound.model_classes[name]
        if not spec.meta_init and _overrides(kind, BaseModel, "from_pretrained"):
            continue  # what it reads there isn't known before the run
        for option in MODEL_OPTIONS:
            if getattr(spec, option) is not None and not specs[name].was_read(option):
                message = f"{kind.__name__} doesn't read it, so it would change nothing"
                raise ConfigError(f"{message}; leave it out", key=f"{spec.key}.{option}")
    if bound.task is None or any(spec.was_read("task") for spec in specs.values()):
        return
    container, pipeline = bound.container_class, bound.pipeline_class
    checked = container is not None and _overrides(container, ModelContainer, "validate_specs")
    if not checked and (pipeline is None or not pipeline.reads_task):
        raise ConfigError(f"nothing here reads a task, so {bound.task!r} would change nothing", key="model.task")


def check_conditions(config: ResolvedConfig, bound: BoundConfig) -> None:
    """Refuse condition batching where there is no pipeline that it could call.

    Raises:
        ConfigError: with the key.
    """
    if config.training.condition_mbs > 1 and bound.pipeline_class is None:
        raise ConfigError(
            "conditions are made by a container's pipeline, and this model has none: leave it at 1",
            key="training.condition_mbs",
        )


def check_data_options(bound: BoundConfig) -> None:
    """Refuse a tokenizer or additions to samples that no part of the model reads.

    Raises:
        ConfigError: with the key.
    """
    for binding in (*bound.datasets, *bound.val_datasets):
        if binding.params.get("tokenizer") is not None and not _tokenises(bound):
            raise ConfigError(
                "no part of the model has a tokenise step, so it isn't read", key=f"{binding.key}.tokenizer"
            )
        _check_entries(binding, bound)


def _check_entries(binding: DatasetBinding, bound: BoundConfig) -> None:
    if not isinstance(binding.factory, AddsEntries):
        return
    consumers = (bound.container_class, bound.pipeline_class) if bound.container_class else bound.model_classes.values()
    known = {entry for consumer in consumers if consumer is not None for entry in consumer.clip_entries}
    for option, entries in binding.factory.optional_entries(binding.params).items():
        if not known.intersection(entries):
            raise ConfigError(
                f"{binding.params[option]!r} adds {', '.join(entries)}, which no part of this model reads (a pipeline "
                f"or single model that does names them in clip_entries; here: {', '.join(sorted(known)) or 'none'})",
                key=f"{binding.key}.{option}",
            )


def _tokenises(bound: BoundConfig) -> bool:
    if bound.container_class is not None and _overrides(bound.container_class, ModelContainer, "build_tokenizer"):
        return True
    return any(_overrides(kind, BaseModel, "build_tokenizer") for kind in bound.model_classes.values())


def _overrides(kind: type, base: type, method: str) -> bool:
    """Whether a class has a class method of its own in place of its base's."""
    return bool(getattr(kind, method).__func__ is not getattr(base, method).__func__)
