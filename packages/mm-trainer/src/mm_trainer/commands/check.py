"""Everything that can be known of a run before its ranks start: what ``mm-trainer check`` shows and ``train`` requires.

Loaded config → resolved for a number of ranks → plugins → a build on meta → patterns. See [Note: build order] in
`mm_trainer.engine.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mm_trainer.config import BoundConfig, ResolvedConfig, TrainerConfig, bind, locate, resolve
from mm_trainer.config.yaml.diagnose import from_value_error
from mm_trainer.errors import ConfigError, DataError, InputError

if TYPE_CHECKING:
    from rich.console import Console

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
class Checked:
    """A configuration that would start.

    Args:
        config: resolved; paths among the plugins' keys are absolute.
        bound: with the classes it names.
        built: the model on meta; None where its shapes aren't known.
        notes: what isn't here and would stop a start.
    """

    config: ResolvedConfig
    bound: BoundConfig
    built: BuiltModel | None
    notes: tuple[str, ...]


def check(config: TrainerConfig, world_size: int, *, require_files: bool) -> Checked:
    """Check ``config`` for ``world_size`` ranks, on this process alone and without weights.

    Args:
        require_files: refuse undefined variables and missing files; otherwise they become notes.

    Raises:
        ConfigError: with file, line and key.
        mm_checkpoint.CheckpointError: a weight folder that can't be read.
    """
    from mm_trainer.contracts.spec import InputSpec

    resolved = resolve(config, world_size)
    bound = bind(resolved, require_files=require_files)
    notes = list(bound.notes)
    try:
        built = _build_if_known(bound, notes, seed=config.training.seed)
        if built is not None:
            _check_patterns(resolved, built)
            _check_heads(resolved, built)
        _check_data(bound, InputSpec() if built is None else built.model.input_spec())
    except ConfigError as error:
        raise locate(config, error) from error
    assert isinstance(bound.config, ResolvedConfig)  # bind keeps the class
    return Checked(bound.config, bound, built, tuple(notes))


def _build(bound: BoundConfig, *, seed: int) -> BuiltModel:
    from mm_trainer.engine.build import build_structure

    return build_structure(bound, seed=seed)


def _build_if_known(bound: BoundConfig, notes: list[str], *, seed: int) -> BuiltModel | None:
    """The structure; None, and a note, where shapes aren't known on this machine."""
    try:
        return _build(bound, seed=seed)
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


def _check_patterns(config: ResolvedConfig, built: BuiltModel) -> None:
    """Resolve every pattern of the configuration against the model's names."""
    from mm_parallel import FieldError, check_features, resolve_plan
    from mm_trainer.optim.optimizers import check_optimizer

    model = built.model
    try:
        resolve_plan(model, config.parallel.fsdp_plan, built.roots)
    except FieldError as error:
        raise from_value_error(config.document, error, ("parallel", "fsdp_plan")) from error
    try:
        check_features(model, config.features)
    except FieldError as error:
        raise from_value_error(config.document, error, ("features",)) from error
    check_optimizer(built.trainable, config.training)


def _check_heads(config: ResolvedConfig, built: BuiltModel) -> None:
    from mm_parallel import FieldError, check_heads

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
            except DataError as error:
                raise ConfigError(str(error), key=binding.key) from error


def scan_data(checked: Checked, sheet: Path, console: Console) -> None:
    """Read every sample of the training set once: tables of what is usable, and a picture of what the model will see.

    Args:
        sheet: where the picture goes, a PNG.

    Raises:
        DataError: nothing is usable.
        InputError: ``sheet`` is no name for a PNG.
    """
    if sheet.suffix.lower() != ".png" or sheet.is_dir():
        raise InputError(f"--sheet {sheet}: expected the name of a .png file")
    sheet.parent.mkdir(parents=True, exist_ok=True)
    from rich.progress import Progress

    from mm_trainer.data.open import open_datasets, worker_options
    from mm_trainer.data.survey.contact_sheet import write_contact_sheet
    from mm_trainer.data.survey.scan import scan, scan_tables

    config = checked.config
    training = config.training
    built = checked.built or _build(checked.bound, seed=training.seed)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading samples", total=None)
        result = scan(
            open_datasets(checked.bound.datasets, checked.bound, built.model.input_spec(), seed=training.seed),
            micro_batch_size=training.micro_batch_size,
            data_size=config.mesh.data,
            accumulation=int(training.gradient_accumulation_steps),
            seed=training.seed,
            workers=worker_options(config),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for table in scan_tables(result):
        console.print(table)
    if not result.buckets:
        raise DataError("no sample can be used")
    write_contact_sheet(result.glimpses, sheet)
    console.print(f"what the model will see: {sheet}", highlight=False, soft_wrap=True, markup=False)


def print_report(checked: Checked, console: Console) -> None:
    """What was checked: the ranks, the batch, the sub-models, and the notes."""
    from rich.markup import escape
    from rich.table import Table

    config = checked.config
    mesh, training = config.mesh, config.training
    console.print(
        f"{config.world_size} ranks = {mesh.replicate} replicas × {mesh.shard} shards; "
        f"{mesh.data} data × {mesh.ring} ring × {mesh.ulysses} ulysses",
        highlight=False,
    )
    console.print(
        f"global batch {training.global_batch_size} = micro batch {training.micro_batch_size} × data {mesh.data} "
        f"× accumulation {training.gradient_accumulation_steps}",
        highlight=False,
    )
    table = Table("sub-model", "parameters", "trainable", "dtype", "source")
    for name, spec in checked.bound.specs.items():
        counts = ["?", "?"]
        if checked.built is not None:
            parameters = list(checked.built.sub_models[name if name in checked.built.sub_models else ""].parameters())
            counts = [
                f"{sum(p.numel() for p in parameters):,}",
                f"{sum(p.numel() for p in parameters if p.requires_grad):,}",
            ]
        source = spec.source.checkpoint_path or spec.source.from_pretrained
        missing = "not here" if name in checked.bound.without_source else "none (random initialisation)"
        table.add_row(name, *counts, spec.dtype, escape(source or missing))
    console.print(table)
    for note in checked.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
