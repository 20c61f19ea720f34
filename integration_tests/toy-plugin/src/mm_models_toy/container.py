"""Which sub-models belong together."""

from collections.abc import Mapping

from mm_trainer.contracts import ModelContainer, ModelSpec
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.flow_match import FlowMatchOptions


class ToyContainer(ModelContainer[FlowMatchOptions]):
    """Roles ``ae``, ``text_encoder`` and ``predictor``; a checkpoint holds the predictor. Its options are those that
    `FlowMatchPipeline` reads: ``model.scheduler`` and ``model.noise_range``."""

    checkpoint_submodels = ("predictor",)
    pipeline_id = "toy_flow"

    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: FlowMatchOptions, task: str | None) -> None:
        if task not in (None, "t2v"):
            raise ConfigError(f"task {task!r} is not t2v, the only one here", key="model.task")
