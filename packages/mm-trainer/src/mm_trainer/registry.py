"""What is installed: models, containers, data sets, optimizers, recipes …, from entry points and decorators.

Looking at the list imports nothing; a plugin is imported when its name is used. Code that isn't packaged registers with
the decorators here, in a module that ``training.plugin`` names::

    @register_model("my_dit")
    class MyDiT(BaseModel): ...
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mm_checkpoint.errors import CheckpointError
from mm_parallel.errors import FieldError as PlanFieldError
from mm_trainer.errors import FieldError, PluginError, TrainerError, nearest

if TYPE_CHECKING:
    from mm_trainer.contracts.clips import ClipProcessor
    from mm_trainer.contracts.container import ModelContainer
    from mm_trainer.contracts.dataset import DatasetFactory
    from mm_trainer.contracts.model import BaseModel
    from mm_trainer.contracts.optimizer import OptimizerFactory
    from mm_trainer.contracts.pipeline import GenerativePipeline

MODELS = "mm_trainer.models"
CONTAINERS = "mm_trainer.containers"
PIPELINES = "mm_trainer.pipelines"
DATASETS = "mm_trainer.datasets"
CLIP_PROCESSORS = "mm_trainer.clip_processors"
OPTIMIZERS = "mm_trainer.optimizers"
RECIPES = "mm_trainer.recipes"
GROUPS = (MODELS, CONTAINERS, PIPELINES, DATASETS, CLIP_PROCESSORS, OPTIMIZERS, RECIPES)
"""Entry-point groups that mm-trainer reads."""

T = TypeVar("T", bound=Callable[..., Any])

_OBJECT = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\]\s*)?")
"""``package.module:Object``, and extras, which the standard allows and nobody uses."""


@dataclass(frozen=True)
class Provider:
    """Who offers an object under a name.

    Args:
        distribution: the installed distribution, or the module that used a decorator.
        target: ``module:object``.
        version: of the distribution; empty for a module.
    """

    distribution: str
    target: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} ({self.target})"


_decorated: dict[tuple[str, str], dict[Provider, Any]] = {}
"""(group, name) → what decorators registered, by provider."""


def register_model(name: str) -> Callable[[T], T]:
    """Class decorator: offer a `BaseModel` under ``name``."""
    return _register(MODELS, name)


def register_container(name: str) -> Callable[[T], T]:
    """Class decorator: offer a `ModelContainer` under ``name``."""
    return _register(CONTAINERS, name)


def register_pipeline(name: str) -> Callable[[T], T]:
    """Class decorator: offer a `GenerativePipeline` under ``name``."""
    return _register(PIPELINES, name)


def register_dataset(name: str) -> Callable[[T], T]:
    """Decorator: offer a data set factory under ``name``."""
    return _register(DATASETS, name)


def register_clip_processor(name: str) -> Callable[[T], T]:
    """Class decorator: offer a `ClipProcessor` under ``name``."""
    return _register(CLIP_PROCESSORS, name)


def register_optimizer(name: str) -> Callable[[T], T]:
    """Class decorator: offer an `OptimizerFactory` under ``name``."""
    return _register(OPTIMIZERS, name)


def _register(group: str, name: str) -> Callable[[T], T]:
    def decorate(target: T) -> T:
        provider = Provider(f"module {target.__module__}", f"{target.__module__}:{target.__qualname__}")
        _decorated.setdefault((group, name), {})[provider] = target  # a module that is run again replaces its own
        return target

    return decorate


def installed(group: str) -> dict[str, list[Provider]]:
    """Name → who offers it, sorted by name; nothing is imported."""
    found: dict[str, set[Provider]] = {}
    for entry in metadata.entry_points(group=group):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "")
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        found.setdefault(entry.name, set()).add(Provider(normalized, entry.value, version))
    for (decorated_group, name), providers in _decorated.items():
        if decorated_group == group:
            found.setdefault(name, set()).update(providers)
    return {name: sorted(found[name], key=str) for name in sorted(found)}


def load_model(name: str) -> type[BaseModel]:
    """The model class called ``name``; raises `PluginError`."""
    from mm_trainer.contracts.model import BaseModel

    return _load_class(MODELS, name, BaseModel)


def load_container(name: str) -> type[ModelContainer]:
    """The container class called ``name``; raises `PluginError`."""
    from mm_trainer.contracts.container import ModelContainer

    return _load_class(CONTAINERS, name, ModelContainer)


def load_pipeline(name: str) -> type[GenerativePipeline]:
    """The pipeline class called ``name``; raises `PluginError`."""
    from mm_trainer.contracts.pipeline import GenerativePipeline

    return _load_class(PIPELINES, name, GenerativePipeline)


def load_dataset_factory(name: str) -> DatasetFactory:
    """The data set factory called ``name``; raises `PluginError`."""
    target, provider = _load(DATASETS, name)
    if not callable(target):
        raise PluginError(f"{name!r} in {DATASETS} of {provider} is not callable, but a {type(target).__name__}")
    return cast("DatasetFactory", target)


def load_clip_processor(name: str) -> ClipProcessor:
    """A new clip processor called ``name``; raises `PluginError`."""
    from mm_trainer.contracts.clips import ClipProcessor

    return cast("ClipProcessor", _make(CLIP_PROCESSORS, name, ClipProcessor))


def load_optimizer_factory(name: str) -> OptimizerFactory:
    """A new optimizer factory called ``name``; raises `PluginError`."""
    from mm_trainer.contracts.optimizer import OptimizerFactory

    return cast("OptimizerFactory", _make(OPTIMIZERS, name, OptimizerFactory))


def import_plugin(module: str) -> None:
    """Import a module of ``training.plugin``, so that its decorators run. It may be in the current folder, whether the
    interpreter was started as ``python -m`` or by a script.

    Raises:
        PluginError: with the cause.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:
        raise PluginError(f"the plugin module {module!r} can't be imported: {_cause(error)}") from error


def origin(plugin: object) -> str:
    """Whose a class, a function or an object is: ``distribution (module:Name)``, for messages."""
    kind = _kind(plugin)
    package = kind.__module__.partition(".")[0]
    # Entry points first: an editable install doesn't say which packages it holds.
    named = (p for group in GROUPS for offers in installed(group).values() for p in offers)
    found = next((p.distribution for p in named if re.split(r"[.:]", p.target)[0] == package), None)
    if found is None or found.startswith("module "):
        found = next(iter(metadata.packages_distributions().get(package, ())), f"module {kind.__module__}")
    return f"{found} ({kind.__module__}:{kind.__qualname__})"


def _kind(plugin: object) -> Any:
    """The class or function itself; a module that FSDP2 wrapped has a class of FSDP2's in front of its own."""
    kind: Any = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    bases = getattr(kind, "__mro__", (kind,))
    return next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp."))


@contextmanager
def blaming(plugin: object, what: str) -> Iterator[None]:
    """Run a plugin's own code: whatever it raises becomes one line that names its distribution, class and place.

    Errors that were made for users say all there is to say, and pass.

    Args:
        plugin: its class, its function, or an object of its class.
        what: which part of it runs, such as ``from_config``.

    Raises:
        PluginError: instead of any other exception.
    """
    try:
        yield
    except (TrainerError, CheckpointError, FieldError, PlanFieldError):
        raise
    except Exception as error:
        raise PluginError(f"{origin(plugin)}: {what} failed: {_cause(error)}{_place(error, plugin)}") from error


def _place(error: BaseException, plugin: object) -> str:
    """The innermost line of the plugin's own package that the error went through."""
    package, place, trace = _kind(plugin).__module__.partition(".")[0], "", error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == package:
            place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def recipes() -> dict[str, list[Provider]]:
    """Recipe name → who ships it."""
    return installed(RECIPES)


def read_recipe(name: str) -> str:
    """YAML text of a recipe.

    The entry point's value is ``package:file.yaml``, a resource of that package.

    Raises:
        PluginError: unknown, claimed twice, or not there.
    """
    provider = find(RECIPES, name)
    package, _, file = provider.target.partition(":")
    try:
        return (resources.files(package) / file).read_text(encoding="utf-8")
    except (OSError, ImportError) as error:
        raise PluginError(f"the recipe {name!r} of {provider} can't be read: {_cause(error)}") from error


def find(group: str, name: str) -> Provider:
    """The one provider of ``name``; nothing is imported.

    Raises:
        PluginError: there is none, with the nearest name, or more than one.
    """
    offers = installed(group)
    if name not in offers:
        close = nearest(name, offers)
        hint = f"; did you mean {close!r}?" if close else ""
        raise PluginError(f"no {name!r} in the group {group}{hint} (installed: {', '.join(offers) or 'none'})")
    providers = offers[name]
    if len(providers) > 1:
        raise PluginError(
            f"{name!r} in the group {group} is claimed by {len(providers)} providers: "
            f"{', '.join(map(str, providers))}; uninstall or rename all but one"
        )
    return providers[0]


def _load(group: str, name: str) -> tuple[Any, Provider]:
    provider = find(group, name)
    if provider in _decorated.get((group, name), {}):
        return _decorated[group, name][provider], provider
    entry = metadata.EntryPoint(name=name, group=group, value=provider.target)
    if _OBJECT.fullmatch(provider.target) is None:
        raise PluginError(
            f"{name!r} in the group {group}: the distribution {provider.distribution} names {provider.target!r}, "
            "which isn't of the form package.module:Object"
        )
    try:
        return entry.load(), provider
    except Exception as error:
        raise PluginError(
            f"{name!r} in the group {group}: {provider.target} of the distribution {provider.distribution} "
            f"can't be loaded: {_cause(error)}"
        ) from error


def _load_class(group: str, name: str, base: type) -> Any:
    target, provider = _load(group, name)
    if not (isinstance(target, type) and issubclass(target, base)):
        raise PluginError(f"{name!r} in the group {group}: {provider} is not a subclass of {base.__name__}")
    return target


def _make(group: str, name: str, protocol: type) -> Any:
    """An instance of a class that is made without arguments."""
    target, provider = _load(group, name)
    if not isinstance(target, type):
        raise PluginError(f"{name!r} in the group {group}: {provider} is not a class")
    try:
        made = target()
    except Exception as error:
        raise PluginError(f"{name!r} in the group {group}: {provider} can't be made: {_cause(error)}") from error
    if not isinstance(made, protocol):
        raise PluginError(f"{name!r} in the group {group}: {provider} is not a {protocol.__name__}")
    return made


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
