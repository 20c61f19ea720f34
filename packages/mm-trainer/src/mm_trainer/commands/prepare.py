"""A loaded configuration, resolved, bound to its plugins and built on meta: once, for every command.

``check`` shows the result, ``train`` and ``cache`` go on from it on their ranks. See [Note: build order] in
`mm_trainer.engine.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mm_trainer import registry
from mm_trainer.config import BoundConfig, ResolvedConfig, TrainerConfig, bind, locate, resolve
from mm_trainer.config.yaml.diagnose import from_value_error
from mm_trainer.errors import ConfigError, DataError, PluginError

if TYPE_CHECKING:
    from mm_trainer.contracts.spec import InputSpec
    from mm_trainer.engine.build import BuiltModel


@runtime_checkable
class ChecksInputSpec(Protocol):
    """A data set factory that can tell from its keys alone whether its samples fit the models."""

    def check_input_spec(self, params: Mapping[str, Any], input_spec: InputSpec) -> None:
        """Raise `DataError` if they don't."""


@runtime_checkable
class HasAttentionHeads(Protocol):
    """A model that splits its sequence; its heads must be divisible by the Ulysses degree."""

    @property
    def attention_heads(self) -> int: ...


@dataclass(frozen=True)
class Prepared:
    """A configuration that would start.

    Args:
        config: resolved; paths among the plugins' keys are absolute.
        bound: with the classes it names.
        structure: the model on meta, which a run takes over; None where its shapes aren't known, or when nobody asked.
        notes: what isn't here and would stop a start.
    """

    config: ResolvedConfig
    bound: BoundConfig
    structure: BuiltModel | None = None
    notes: tuple[str, ...] = ()


def prepare(config: TrainerConfig, world_size: int, *, require_files: bool = True, check: bool = True) -> Prepared:
    """Resolve ``config`` for ``world_size`` ranks, import its plugins and check it, on this process alone and without
    weights. What needs no plugin is answered before anything heavy is imported.

    Args:
        require_files: refuse undefined variables and missing files; otherwise they become notes.
        check: False for a rank whose launcher has checked: nothing is built, and the rules that need a model aren't
            asked again.

    Raises:
        ConfigError: with file, line and key.
        mm_checkpoint.CheckpointError: a weight folder that can't be read.
    """
    resolved = resolve(config, world_size)
    bound = bind(resolved, require_files=require_files)
    assert isinstance(bound.config, ResolvedConfig)  # bind keeps the class
    prepared = Prepared(bound.config, bound, notes=bound.notes)
    if not check:
        return prepared
    try:
        return _checked(prepared)
    except ConfigError as error:
        raise locate(config, error) from error


def _checked(prepared: Prepared) -> Prepared:
    from mm_trainer.commands.unread import check_conditions, check_data_options
    from mm_trainer.contracts.spec import InputSpec

    config, bound, notes = prepared.config, prepared.bound, list(prepared.notes)
    structure = _build_if_known(bound, notes, seed=config.training.seed)
    if structure is not None:
        _check_patterns(config, bound, structure)
        _check_context_parallel(config, structure)
    check_conditions(config, bound)
    _check_data(bound, InputSpec() if structure is None else structure.model.input_spec())
    check_data_options(bound)
    return replace(prepared, structure=structure, notes=tuple(notes))


def _build_if_known(bound: BoundConfig, notes: list[str], *, seed: int) -> BuiltModel | None:
    """The structure; None, and a note, where shapes aren't known on this machine."""
    from mm_trainer.commands.unread import WatchedSpec, check_model_options
    from mm_trainer.engine.build import build_structure

    watched = {name: WatchedSpec.of(spec) for name, spec in bound.specs.items()}
    try:
        structure = build_structure(replace(bound, specs=watched), seed=seed)
        check_model_options(bound, watched)
        return replace(structure, specs={prefix: bound.specs[s.name] for prefix, s in structure.specs.items()})
    except ConfigError as error:
        unknown = _unknown_shapes(error, bound)
        if unknown is None:
            raise
    notes.append(
        f"the shapes of {unknown} are not known (its weights aren't here and no architecture is given): "
        "patterns and sizes are not checked"
    )
    return None


def _unknown_shapes(error: ConfigError, bound: BoundConfig) -> str | None:
    """The sub-model whose shapes ``error`` misses only because its weights aren't on this machine."""
    for name in bound.without_source:
        spec = bound.specs[name]
        if spec.architecture is None and error.key == f"{spec.key}.architecture":
            return name
    return None


def _check_patterns(config: ResolvedConfig, bound: BoundConfig, built: BuiltModel) -> None:
    """Resolve every pattern of the configuration against the model's names."""
    from mm_parallel import FieldError, check_features, resolve_plan
    from mm_trainer.optim.optimizers import check_optimizer

    model = built.model
    if config.parallel.fsdp_plan.cross_submodel_prefetch and bound.pipeline_class is None:
        raise ConfigError(
            "it is a container's pipeline that prefetches, and this model has none: leave it out",
            key="parallel.fsdp_plan.cross_submodel_prefetch",
        )
    try:
        resolve_plan(model, config.parallel.fsdp_plan, built.roots)
    except FieldError as error:
        raise from_value_error(config.document, error, ("parallel", "fsdp_plan")) from error
    try:
        check_features(model, config.features)
    except FieldError as error:
        raise from_value_error(config.document, error, ("features",)) from error
    check_optimizer(built.trainable, config.training)


def _check_context_parallel(config: ResolvedConfig, built: BuiltModel) -> None:
    """What is trained splits its sequence, and the Ulysses degree divides its heads."""
    from mm_parallel import FieldError, check_heads

    mesh = config.mesh
    whole = [model for model in built.trainable.values() if not model.splits_sequence]
    if mesh.ulysses * mesh.ring > 1 and whole:
        raise ConfigError(
            f"{registry.origin(type(whole[0]))} doesn't split its sequence (splits_sequence), so the "
            f"{mesh.ulysses * mesh.ring} ranks that share a sample would all compute the same",
            key="parallel.ulysses_parallel_size" if mesh.ulysses > 1 else "parallel.ring_attention_size",
        )
    for model in built.sub_models.values():
        if isinstance(model, HasAttentionHeads):
            try:
                check_heads(model.attention_heads, config.mesh.ulysses)
            except FieldError as error:
                raise from_value_error(config.document, error, ("parallel",)) from error


def _check_data(bound: BoundConfig, spec: InputSpec) -> None:
    """The data sets' own rules, and frames and sizes of the samples against the models' strides."""
    for binding in (*bound.datasets, *bound.val_datasets):
        if isinstance(binding.factory, ChecksInputSpec):
            try:
                binding.factory.check_input_spec(binding.params, spec)
            except (DataError, PluginError) as error:
                raise ConfigError(str(error), key=binding.key) from error
