"""Which sub-models belong together."""

from mm_trainer.contracts import ModelContainer
from mm_trainer.pipelines.flow_match import FlowMatchOptions


class ToyContainer(ModelContainer):
    """Roles ``ae``, ``text_encoder`` and ``predictor``; a checkpoint holds the predictor."""

    class Options(FlowMatchOptions):
        """``model.scheduler`` and ``model.noise_range``, as `FlowMatchPipeline` reads them."""

    checkpoint_submodels = ("predictor",)
    pipeline_id = "toy_flow"
