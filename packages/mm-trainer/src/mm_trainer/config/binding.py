"""Import the plugins that a configuration names, and validate the keys that only they know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel as PydanticModel

from mm_checkpoint.config import WeightSourceConfig
from mm_trainer import registry
from mm_trainer.config.schema import TrainerConfig
from mm_trainer.config.sections.data import DatasetEntry, DatasetParam
from mm_trainer.config.sections.fields import absolute_paths, keys_of
from mm_trainer.config.sections.model import SINGLE_MODEL_KEYS, ModelConfig, SubModelConfig
from mm_trainer.config.yaml.diagnose import from_value_error, located, validate
from mm_trainer.config.yaml.document import Document, split_key
from mm_trainer.errors import ConfigError, PluginError, nearest

if TYPE_CHECKING:
    from mm_checkpoint import WeightSource
    from mm_trainer.contracts.container import ModelContainer
    from mm_trainer.contracts.dataset import DatasetFactory
    from mm_trainer.contracts.model import BaseModel
    from mm_trainer.contracts.pipeline import GenerativePipeline
    from mm_trainer.contracts.spec import ModelSpec, Options

T = TypeVar("T")
AnyOptions = TypeVar("AnyOptions", bound=PydanticModel)


@dataclass(frozen=True)
class DatasetBinding:
    """One data set of ``data.dataset_param``, alone or in a mix.

    Args:
        key: where it stands in the configuration.
        factory: makes it.
        params: its keys as validated plain values, paths absolute.
        weight: share in the mix; None where none is given.
        repeats: passes per epoch of the mix.
    """

    key: str
    factory: DatasetFactory
    params: Mapping[str, Any]
    weight: float | None = None
    repeats: int = 1


@dataclass(frozen=True)
class BoundConfig:
    """A configuration together with the classes it names.

    Args:
        config: the configuration; paths among the plugins' keys are absolute now.
        container_class: None for a single model.
        container_options: instance of the container's ``Options``.
        pipeline_class: of ``model.pipeline`` or the container's own; None where neither names one.
        model_classes: sub-model name → class; a single model is called ``model``.
        specs: sub-model name → what its class is built from.
        task: ``model.task``.
        datasets: of ``data.dataset_param``, one or a mix.
        val_datasets: of ``data.val_dataset_param``; may be empty.
        notes: what is missing here and would stop a start.
        without_source: sub-models whose weights are named but not there.
    """

    config: TrainerConfig
    container_class: type[ModelContainer] | None
    container_options: Options
    pipeline_class: type[GenerativePipeline] | None
    model_classes: Mapping[str, type[BaseModel]]
    specs: Mapping[str, ModelSpec]
    task: str | None
    datasets: tuple[DatasetBinding, ...]
    val_datasets: tuple[DatasetBinding, ...]
    notes: tuple[str, ...] = ()
    without_source: frozenset[str] = frozenset()

    @property
    def frozen(self) -> tuple[str, ...]:
        """The sub-models that make conditions: those that are frozen as a whole."""
        return tuple(name for name, spec in self.specs.items() if spec.freeze is True)


def bind(config: TrainerConfig, *, require_files: bool = True) -> BoundConfig:
    """Import what ``config`` names and validate the plugins' own keys.

    Args:
        config: as loaded, or as resolved.
        require_files: refuse undefined variables and missing files; otherwise they are noted, and a sub-model whose
            weights aren't there gets a spec without a source.

    Raises:
        ConfigError: a key that no plugin knows, a plugin that isn't there, a missing file.
    """
    return _Binder(config, require_files).bind()


class _Binder:
    def __init__(self, config: TrainerConfig, require_files: bool) -> None:
        self._config, self._require_files = config, require_files
        self._document: Document = config.document
        self._notes: list[str] = []
        self._without_source: set[str] = set()

    def bind(self) -> BoundConfig:
        config = self._config
        self._check_variables()
        for i, module in enumerate(config.training.plugin):
            self._load(registry.import_plugin, module, f"training.plugin.{i}")
        self._load(
            lambda name: registry.find(registry.OPTIMIZERS, name), config.training.optimizer, "training.optimizer"
        )
        self._check_files()
        container_class, container_options, pipeline_class = self._container()
        bound = {name: self._model(name, sub) for name, sub in config.model.sub_models.items()}
        specs = {name: spec for name, (_, spec) in bound.items()}
        if container_class is not None:
            self._validate_specs(container_class, specs, container_options)
        datasets, data_param = self._datasets("dataset_param")
        val_datasets, val_param = self._datasets("val_dataset_param")
        return BoundConfig(
            config=replace(
                config,
                model=_with_options(config.model, container_options, specs),
                data=config.data.model_copy(update={"dataset_param": data_param, "val_dataset_param": val_param}),
            ),
            container_class=container_class,
            container_options=container_options,
            pipeline_class=pipeline_class,
            model_classes={name: cls for name, (cls, _) in bound.items()},
            specs=specs,
            task=config.model.task,
            datasets=datasets,
            val_datasets=val_datasets,
            notes=tuple(self._notes),
            without_source=frozenset(self._without_source),
        )

    # --- models ---------------------------------------------------------------------------------------------------

    def _container(self) -> tuple[type[ModelContainer] | None, Options, type[GenerativePipeline] | None]:
        from mm_trainer.contracts.spec import NoOptions

        model = self._config.model
        if model.models is None:
            return None, NoOptions(), None
        container_class = self._load(registry.load_container, model.model_id, "model.model_id")
        beside = {name: kind for name, kind in keys_of(ModelConfig).items() if name not in SINGLE_MODEL_KEYS}
        options = self._options(container_class.Options, model.extras, "model", beside)
        pipeline_id = model.pipeline or container_class.pipeline_id
        if pipeline_id is None:
            return container_class, options, None
        return container_class, options, self._load(registry.load_pipeline, pipeline_id, "model.pipeline")

    def _validate_specs(
        self, container_class: type[ModelContainer], specs: Mapping[str, ModelSpec], options: Options
    ) -> None:
        try:
            container_class.validate_specs(specs, options, self._config.model.task)
            with registry.blaming(container_class, "checkpointed"):
                checkpointed = container_class.checkpointed(specs)
            absent = [name for name in checkpointed if name not in specs]
            if absent:
                close = nearest(absent[0], specs)
                hint = f"; did you mean that by {close}?" if close else ""
                message = f"the container {self._config.model.model_id} needs a sub-model {absent[0]}{hint}"
                raise ConfigError(f"{message} (given: {', '.join(specs)})", key="model.models")
        except ConfigError as error:
            raise located(self._document, error) from error
        except ValueError as error:
            raise from_value_error(self._document, error, ("model",)) from error

    def _model(self, name: str, sub: SubModelConfig) -> tuple[type[BaseModel], ModelSpec]:
        from mm_trainer.contracts.spec import ModelSpec

        key = self._config.model.key_of(name)
        model_class = self._load(registry.load_model, sub.model_id, f"{key}.model_id")
        if not isinstance(model_class.key_map, str | None):
            raise self._error(
                f"{registry.origin(model_class)}: key_map must be the name of a registered key map, got a "
                f"{type(model_class.key_map).__qualname__}",
                f"{key}.model_id",
            )
        options = self._options(model_class.Options, sub.extras, key, keys_of(type(sub)))
        default = self._config.training.init_model_with_meta_device
        source, weights = self._source(name, sub, key)
        spec = ModelSpec(
            name=name,
            model_id=sub.model_id,
            source=source,
            weights=weights,
            dtype=sub.dtype or "fp32",
            meta_init=default if sub.meta_init is None else sub.meta_init,
            freeze=sub.freeze,
            architecture=sub.architecture,
            attn_implementation=sub.attn_implementation,
            task=self._config.model.task,
            seed=self._config.training.seed,
            options=options,
        )
        return model_class, spec

    def _source(self, name: str, sub: SubModelConfig, key: str) -> tuple[WeightSourceConfig, WeightSource | None]:
        """The sub-model's weight source, and what is there; where files may be missing, without what isn't there."""
        source = sub.source
        if self._require_files:
            return source, self._resolve(source, key)
        absent = {field for field in ("checkpoint_path", "from_pretrained") if self._is_absent(source, field)}
        if source.format == "dcp" and source.from_pretrained is not None:
            missing = absent - {"checkpoint_path"}  # it may be the cache that the first start makes
        else:
            missing = absent
        for field in sorted(missing):
            path = getattr(source, field)
            if not path.startswith("$"):  # an undefined variable has been noted
                self._note(f"{path} isn't here", f"{key}.{field}")
            self._without_source.add(name)
        if missing:
            source = WeightSourceConfig(**{k: v for k, v in asdict(source).items() if k not in absent})
        return source, self._resolve(source, key)

    def _resolve(self, source: WeightSourceConfig, key: str) -> WeightSource | None:
        """Look up, this once, which weights a source means."""
        from mm_checkpoint import resolve_source
        from mm_checkpoint.errors import BadInputError

        try:
            return resolve_source(source)
        except BadInputError as error:
            blamed = "checkpoint_path" if source.checkpoint_path else "from_pretrained"
            raise self._error(str(error), f"{key}.{blamed}") from error

    @staticmethod
    def _is_absent(source: WeightSourceConfig, field: str) -> bool:
        path = getattr(source, field)
        return path is not None and not os.path.exists(path)

    # --- data -----------------------------------------------------------------------------------------------------

    def _datasets(self, section: str) -> tuple[tuple[DatasetBinding, ...], DatasetParam | None]:
        """Bindings of one or several data sets, and the section with absolute paths."""
        param: DatasetParam | None = getattr(self._config.data, section)
        if param is None:
            return (), None
        key = f"data.{section}"
        if param.datasets is None:
            binding, extras = self._dataset(param, key)
            return (binding,), param.model_copy(update=extras)
        bindings, entries = [], []
        for i, entry in enumerate(param.datasets):
            binding, extras = self._dataset(entry, f"{key}.datasets.{i}")
            bindings.append(replace(binding, weight=entry.weight, repeats=entry.repeats))
            entries.append(entry.model_copy(update=extras))
        return tuple(bindings), param.model_copy(update={"datasets": tuple(entries)})

    def _dataset(self, entry: DatasetEntry, key: str) -> tuple[DatasetBinding, dict[str, Any]]:
        """The binding of one data set, and its own keys with absolute paths."""
        assert entry.dataset_type is not None  # the section refuses it
        factory = self._load(registry.load_dataset_factory, entry.dataset_type, f"{key}.dataset_type")
        shared = {"dataset_type": entry.dataset_type, "tokenizer": entry.tokenizer and str(entry.tokenizer)}
        if entry.tokenizer is not None:
            self._check_path(entry.tokenizer, f"{key}.tokenizer")
        extras = entry.extras
        options_class = getattr(factory, "Options", None)
        if isinstance(options_class, type) and issubclass(options_class, PydanticModel):
            own = {name: shared[name] for name in shared.keys() & options_class.model_fields.keys()}
            options = self._options(options_class, extras | own, key, keys_of(type(entry)))
            for name in options_class.model_fields:
                if isinstance(path := getattr(options, name), Path):
                    self._check_path(path, f"{key}.{name}")
            extras = options.model_dump(mode="json", exclude=set(shared))
        return DatasetBinding(key, factory, {**shared, **extras}), extras

    # --- files ----------------------------------------------------------------------------------------------------

    def _check_variables(self) -> None:
        for undefined in self._document.undefined:
            names = ", ".join(undefined.names)
            verb = "is" if len(undefined.names) == 1 else "are"
            self._missing(f"the environment variable {names} {verb} not defined", undefined.key)

    def _check_files(self) -> None:
        """Folders that the core sections name, other than weights."""
        training = self._config.training
        if isinstance(training.load, Path):
            self._check_path(training.load, "training.load")
        if training.init_from is not None:
            self._check_path(training.init_from, "training.init_from")
        if self._config.data.cache is not None:
            self._check_path(self._config.data.cache, "data.cache")
        save = self._config.training.save
        blocking = next((p for p in (save, *save.parents) if p.exists() and not p.is_dir()), None)
        if blocking is not None:
            raise self._error(f"{blocking} is a file, so {save} can't be a folder", "training.save")

    def _check_path(self, path: Path, key: str) -> None:
        if not path.exists() and not str(path).startswith("$"):
            self._missing(f"{path} doesn't exist", key)

    def _missing(self, message: str, key: str) -> None:
        if self._require_files:
            raise self._error(message, key)
        self._note(message, key)

    def _note(self, message: str, key: str) -> None:
        self._notes.append(str(self._error(message, key)))

    # --- errors ---------------------------------------------------------------------------------------------------

    def _error(self, message: str, key: str) -> ConfigError:
        return located(self._document, ConfigError(message, key=key))

    def _load(self, load: Callable[[str], T], name: str, key: str) -> T:
        try:
            return load(name)
        except PluginError as error:
            raise self._error(f"{error}{self._mistaken_for(name, key)}", key) from error

    def _mistaken_for(self, name: str, key: str) -> str:
        """A hint where a container's name stands for a model's or the other way round."""
        if key != "model.model_id":
            return ""
        if self._config.model.models is None and name in registry.installed(registry.CONTAINERS):
            return f"; {name} is a container: its sub-models go under model.models"
        if self._config.model.models is not None and name in registry.installed(registry.MODELS):
            return f"; {name} is a single model: it has no model.models"
        return ""

    def _options(
        self, options: type[AnyOptions], values: Mapping[str, Any], key: str, beside: Mapping[str, Any]
    ) -> AnyOptions:
        """A plugin's own keys, validated by its class; paths absolute."""
        validated = validate(options, values, self._document, split_key(key), beside=beside)
        absolute: AnyOptions = absolute_paths(validated, self._document.environment.cwd)
        return absolute


def _with_options(model: ModelConfig, container_options: Options, specs: Mapping[str, ModelSpec]) -> ModelConfig:
    """The section with the plugins' keys as validated: defaults filled in, paths absolute."""
    if model.models is None:
        return model.model_copy(update=specs["model"].options.model_dump(mode="json"))
    models = {
        name: sub.model_copy(update=specs[name].options.model_dump(mode="json")) for name, sub in model.models.items()
    }
    return model.model_copy(update={**container_options.model_dump(mode="json"), "models": models})
