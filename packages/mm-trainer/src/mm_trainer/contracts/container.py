"""`ModelContainer`: owns the components' lifecycle and delegates the data flow to a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from mm_trainer.contracts.alternation import Alternation
from mm_trainer.contracts.model import BaseModel, Tokenizer
from mm_trainer.contracts.options import TakesOptions
from mm_trainer.contracts.pipeline import GenerativePipeline, ModelOutput
from mm_trainer.contracts.sampling import Sampler
from mm_trainer.contracts.spec import InputSpec, ModelSpec, OptionsT
from mm_trainer.contracts.step import StepContext


class ModelContainer(nn.Module, TakesOptions[OptionsT]):
    """Base class of containers; registered under the entry-point group ``mm_trainer.containers``.

    Components are plain attributes, so module names are flat (``predictor.blocks.0``) and patterns of the
    configuration match them directly.

    A subclass must declare :attr:`checkpoint_submodels`; it may declare the others. One with keys of its own derives
    from ``ModelContainer[MyOptions]``. One that brings its own gradient synchronisation defines the three methods of
    `mm_trainer.engine.sync.GradientSync`.
    """

    checkpoint_submodels: tuple[str, ...]
    """Components whose weights go into a checkpoint: all that are trained."""
    pipeline_id: ClassVar[str | None] = None
    """Name in the entry-point group ``mm_trainer.pipelines``; ``model.pipeline`` of the configuration overrides it."""
    condition_options: ClassVar[tuple[str, ...] | None] = None
    """Those of the options that change what the frozen encoders make, so that a cache made with others is stale; None:
    all of them."""
    clip_entries: ClassVar[tuple[str, ...]] = ()
    """Which entries of clip processors (`ClipProcessor.entries`) its own forward reads; a pipeline states its own."""
    wraps_root: ClassVar[bool] = False
    """True: the container is one FSDP root. False: it isn't wrapped, and every sub-model is a root of its own."""
    alternation: Alternation | None = None
    """Which sub-models a step trains, and what is validated; None: every step trains all that have something to train,
    and there is one validation."""

    sampler: ClassVar[type[Sampler[Any]] | None] = None
    """Makes clips from pipeline folders; optional."""

    def __init__(self, components: Mapping[str, BaseModel], pipeline: GenerativePipeline | None = None) -> None:
        super().__init__()
        for name, component in components.items():
            setattr(self, name, component)
        self._component_names = tuple(components)
        self.pipeline = pipeline
        self._step_context = StepContext()
        if not hasattr(type(self), "checkpoint_submodels"):
            raise TypeError(f"{type(self).__qualname__} must declare checkpoint_submodels")
        unknown = [name for name in self.checkpoint_submodels if name not in components]
        if unknown:
            raise ValueError(f"{type(self).__qualname__} checkpoints {unknown}, but is built from {sorted(components)}")

    @classmethod
    def checkpointed(cls, specs: Mapping[str, ModelSpec]) -> tuple[str, ...]:
        """Names of the components that a checkpoint holds, known before anything is built."""
        if not hasattr(cls, "checkpoint_submodels"):
            raise TypeError(f"{cls.__qualname__} must declare checkpoint_submodels")
        return cls.checkpoint_submodels

    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: OptionsT, task: str | None) -> None:
        """Check what only this container can know (roles present, task known); raise `ConfigError`.

        Where this isn't overridden, the pipeline doesn't look at tasks and no component reads ``spec.task``, a
        configuration that states a task is refused.
        """

    def get_sub_models(self) -> dict[str, BaseModel]:
        """Name → component, in the order of the configuration."""
        return {name: getattr(self, name) for name in self._component_names}

    def train(self, mode: bool = True) -> Self:
        """Switch the components that have something to train; what is frozen stays in eval (see `BaseModel.train`)."""
        self.training = mode
        for component in self.get_sub_models().values():
            component.train(mode and any(p.requires_grad for p in component.parameters()))
        return self

    def forward(self, **batch: Any) -> ModelOutput:
        """Delegate to the pipeline."""
        if self.pipeline is None:
            raise NotImplementedError(f"{type(self).__qualname__} has no pipeline and doesn't override forward")
        return self.pipeline.forward(self.get_sub_models(), self._step_context, **batch)

    def set_step_context(self, context: StepContext) -> None:
        """Take what the engine lends the pipeline's stages; handed on by every forward."""
        self._step_context = context

    def input_spec(self) -> InputSpec:
        """What the components, chained, ask of a clip; override it where two of them work side by side."""
        return InputSpec.merge(component.input_spec() for component in self.get_sub_models().values())

    @classmethod
    def build_tokenizer(
        cls, model_classes: Mapping[str, type[BaseModel]], specs: Mapping[str, ModelSpec], path: str
    ) -> Tokenizer | None:
        """The tokenise step of the one component that has one."""
        candidates = (model_class.build_tokenizer(path, specs[name]) for name, model_class in model_classes.items())
        found = [tokenizer for tokenizer in candidates if tokenizer is not None]
        if len(found) > 1:
            raise TypeError(f"{cls.__qualname__}: several components tokenise; override build_tokenizer")
        return found[0] if found else None

    # --- checkpoint (assumption 3 of the engine) --------------------------------------------------------------------

    def export_folders(self, specs: Mapping[str, ModelSpec]) -> dict[str, str]:
        """Folder of each checkpointed component in an exported pipeline, no two of them the same.

        By default what each component says, see `BaseModel.export_folder`; their names where two would say the same.
        """
        parts = self.get_sub_models()
        folders = {name: parts[name].export_folder(specs[name]) for name in self.checkpoint_submodels}
        return folders if len(set(folders.values())) == len(folders) else {name: name for name in folders}

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """State of the checkpointed components only, under ``prefix + component + "."``."""
        state: dict[str, Any] = {} if destination is None else destination
        for name in self.checkpoint_submodels:
            getattr(self, name).state_dict(destination=state, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Hand each component its part by prefix.

        Returns:
            the missing and unexpected keys, with their full names; raises RuntimeError if strict and there are any.
        """
        missing: list[str] = []
        unexpected = [k for k in state_dict if k.split(".", 1)[0] not in self.checkpoint_submodels]
        for name in self.checkpoint_submodels:
            part = {k[len(name) + 1 :]: v for k, v in state_dict.items() if k.startswith(f"{name}.")}
            result = getattr(self, name).load_state_dict(part, strict=False, assign=assign)
            missing += [f"{name}.{k}" for k in result.missing_keys]
            unexpected += [f"{name}.{k}" for k in result.unexpected_keys]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"state dict doesn't fit {type(self).__qualname__}: {len(missing)} missing {missing[:5]}, "
                f"{len(unexpected)} unexpected {unexpected[:5]}"
            )
        return _IncompatibleKeys(missing, unexpected)
