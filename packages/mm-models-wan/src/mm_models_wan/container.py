"""`Wan22Container`: the VAE, the text encoder and one or two experts under one roof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.options import PREDICTORS, TASKS, Wan22Options
from mm_models_wan.pipeline import WanPipeline
from mm_models_wan.sampling import WanSampler
from mm_models_wan.weights.release import expert_of
from mm_trainer.contracts import BaseModel, GenerativePipeline, InputSpec, ModelContainer, ModelSpec, component
from mm_trainer.errors import ConfigError


@dataclass(frozen=True)
class ExpertAlternation:
    """[Note: two experts in one run] One optimizer step trains one expert, drawn with the natural probability of its
    noise range and keyed by (seed, step), so that all ranks and micro-steps agree. The other one runs neither forward
    nor backward, so its gradients stay None and its parameters sharded. Each is validated in its own noise range.
    """

    pipeline: WanPipeline

    def begin(self, step: int) -> Sequence[str]:
        """Draw the predictor that the next step trains, after ``step`` finished ones."""
        name = self.pipeline.draw_predictor(step)
        self.pipeline.activate(name)
        return (name,)

    def views(self) -> Iterator[str]:
        """Both experts in turn."""
        for name in self.pipeline.schedules:
            self.pipeline.activate(name)
            yield name


class Wan22Container(ModelContainer[Wan22Options]):
    """Roles ``ae``, ``text_encoder``, ``predictor`` and, with ``expert: both``, ``predictor_2``, between which
    `ExpertAlternation` alternates.
    """

    checkpoint_submodels: tuple[str, ...] = ("predictor",)
    pipeline_id: ClassVar[str | None] = "wan2_2"
    sampler = WanSampler
    condition_options: ClassVar[tuple[str, ...] | None] = ("last_frame",)

    def __init__(self, components: Mapping[str, BaseModel], pipeline: GenerativePipeline | None = None) -> None:
        if not isinstance(pipeline, WanPipeline):
            raise ConfigError(
                f"{type(self).__name__} needs a WanPipeline, got {type(pipeline).__name__}", key="model.pipeline"
            )
        self.checkpoint_submodels = tuple(name for name in PREDICTORS if name in components)
        super().__init__(components, pipeline)
        self._schedules = pipeline.schedules
        if len(self.checkpoint_submodels) > 1:
            self.alternation = ExpertAlternation(pipeline)

    @classmethod
    def checkpointed(cls, specs: Mapping[str, ModelSpec]) -> tuple[str, ...]:
        return tuple(name for name in PREDICTORS if name in specs)

    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: Wan22Options, task: str | None) -> None:
        if task not in TASKS:
            raise ConfigError(f"task {task!r} is not one of: {', '.join(TASKS)}", key="model.task")
        if options.last_frame and task != "i2v":
            raise ConfigError(f"last_frame belongs to task i2v, got task {task}", key="model.last_frame")
        if "predictor_2" in specs and options.expert != "both":
            raise ConfigError(
                "two predictors are two experts: set expert: both to train them in one run, or leave predictor_2 out "
                "and train each in a run of its own",
                key="model.models.predictor_2",
            )
        roles = ("ae", "text_encoder", *PREDICTORS[: 2 if options.expert == "both" else 1])
        missing = [role for role in roles if role not in specs]
        unknown = [name for name in specs if name not in roles]
        if missing or unknown:
            raise ConfigError(
                f"the sub-models here are {', '.join(roles)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}",
                key="model.models",
            )

    def input_spec(self) -> InputSpec:
        """As one chain: the experts work side by side, so only the first of them is part of it."""
        components = self.get_sub_models()
        return InputSpec.merge(m.input_spec() for name, m in components.items() if name not in PREDICTORS[1:])

    def export_folders(self, specs: Mapping[str, ModelSpec]) -> dict[str, str]:
        """The high-noise expert, or the only transformer, is ``transformer``; the low-noise one ``transformer_2``."""
        models = self.get_sub_models()
        predictors = {name: component(models, name, WanPredictor) for name in self.checkpoint_submodels}
        experts = {
            name: expert_of(self._schedules[name].noise_range, predictor.release, predictor.architecture.in_channels)
            for name, predictor in predictors.items()
        }
        return {name: "transformer_2" if expert == "low" else "transformer" for name, expert in experts.items()}
