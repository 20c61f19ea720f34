"""A plugin module as `training.plugin` names it: a model, a container and a data set that need no files."""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable, Mapping
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from mm_parallel import KeyedInitializer
from mm_trainer.contracts import BaseModel, DatasetContext, InputSpec, ModelContainer, ModelOutput, ModelSpec, Options
from mm_trainer.errors import DataError
from mm_trainer.registry import register_container, register_dataset, register_model


class CastLinear(nn.Linear):
    """Casts its own input, as a unit must."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


@register_model("cfg_model")
class CfgModel(BaseModel):
    """Two linear layers; fails on demand."""

    splits_sequence = True

    class Options(Options):
        width: int = Field(default=4, ge=1)
        fail_rank: int | None = None
        die_in_forward: int | None = None

    def __init__(self, width: int, fail_rank: int | None, die_in_forward: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CastLinear(width, width) for _ in range(2))
        self._fail_rank, self._die_in_forward = fail_rank, die_in_forward
        self._forwards = 0

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(**spec.options.model_dump())

    @property
    def attention_heads(self) -> int:
        return 6

    def input_spec(self) -> InputSpec:
        return InputSpec(spatial_multiple=2)

    def init_weights(self, init: KeyedInitializer, prefix: str = "") -> None:
        for name, parameter in self.named_parameters():
            init.normal_(parameter, prefix + name, std=0.5)

    def forward(self, **batch: Any) -> Any:
        self._forwards += 1
        if os.environ.get("RANK") == str(self._fail_rank):
            if self._die_in_forward is None:
                raise RuntimeError("boom")
            if self._forwards == self._die_in_forward and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return ModelOutput(loss=x.float().square().mean())


@register_model("cfg_shaped")
class CfgShaped(CfgModel):
    """Takes its width from an architecture, as written in a config.json."""

    architectures = {"small": {"width": 4}}

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        return cls(cls.read_architecture(spec)["width"], None, None)


@register_model("cfg_whole")
class WholeModel(CfgModel):
    """Knows nothing of context parallelism."""

    splits_sequence = False


@register_container("cfg_container")
class CfgContainer(ModelContainer):
    """An encoder and a predictor."""

    class Options(Options):
        mode: str = "plain"

    checkpoint_submodels = ("predictor",)

    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: Options, task: str | None) -> None:
        """Any task will do."""

    def forward(self, **batch: Any) -> ModelOutput:
        return self.get_sub_models()["predictor"](**batch)


@register_dataset("cfg_numbers")
class CfgNumbers:
    """Vectors of random numbers."""

    class Options(Options):
        samples: int = Field(default=8, ge=1)
        width: int = 4

    def __init__(self, config: Mapping[str, Any], context: DatasetContext) -> None:
        self.options = self.Options.model_validate(config)

    @classmethod
    def check_input_spec(cls, params: Mapping[str, Any], input_spec: InputSpec) -> None:
        if params["width"] % input_spec.spatial_multiple:
            raise DataError(f"width {params['width']} is no multiple of {input_spec.spatial_multiple}")

    def __len__(self) -> int:
        return self.options.samples

    def bucket(self, index: int) -> Hashable:
        return 0

    def tokens(self, index: int) -> int:
        return 1

    def load(self, index: int, sample_key: int) -> Mapping[str, Tensor]:
        return {"x": torch.full((self.options.width,), float(index + 1))}
