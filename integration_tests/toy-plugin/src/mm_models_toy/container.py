"""Which sub-models belong together."""

from mm_trainer.contracts import ModelContainer
from mm_trainer.pipelines.flow_match import FlowMatchOptions


class ToyContainer(ModelContainer[FlowMatchOptions]):
    """Roles ``ae``, ``text_encoder`` and ``predictor``; a checkpoint holds the predictor. Its options are those that
    `FlowMatchPipeline` reads: ``model.scheduler`` and ``model.noise_range``."""

    checkpoint_submodels = ("predictor",)
    pipeline_id = "toy_flow"
