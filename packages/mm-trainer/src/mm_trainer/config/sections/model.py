"""The section ``model``: a container of sub-models, or a single model."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mm_checkpoint.config import WeightSourceConfig
from mm_trainer.config.sections.fields import OpenSection
from mm_trainer.errors import FieldError


class SubModelConfig(OpenSection):
    """One sub-model; keys that are not listed here belong to its model class and are validated by that.

    The keys from ``from_pretrained`` to ``broadcast_from_rank0`` are those of `WeightSourceConfig`.
    """

    model_id: str
    """Name in the entry-point group mm_trainer.models (`mm-trainer models` lists them)."""
    from_pretrained: str | None = None
    """Folder or hub id of the weights."""
    checkpoint_path: str | None = None
    """Weights that come before from_pretrained."""
    load_format: str = "auto"
    """auto, hf, diffusers or dcp; also under the names checkpoint_format and hub_backend."""
    checkpoint_conversion_dir: str | None = None
    """Where `load_format: dcp` keeps weights that it converted."""
    dcp_cache_dir: str | None = None
    """Another name of checkpoint_conversion_dir."""
    dcp_conversion_dir: str | None = None
    """Another name of checkpoint_conversion_dir."""
    allow_missing: tuple[str, ...] = ()
    """Names of parameters and buffers that the weights need not hold."""
    broadcast_from_rank0: bool = False
    """Only rank 0 reads the files."""

    meta_init: bool | None = None
    """Build without memory first; null: training.init_model_with_meta_device."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the stored parameters; null: fp32."""
    freeze: bool | Annotated[tuple[str, ...], Field(min_length=1)] = False
    """Train nothing of it (true), or not what these patterns match."""
    architecture: str | dict[str, Any] | None = None
    """Shapes by name or as in a config.json, where no weight folder is readable."""
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.source  # noqa: B018 - raises ValueError for what WeightSourceConfig refuses
        return self

    @property
    def source(self) -> WeightSourceConfig:
        """Where the weights come from."""
        return WeightSourceConfig(**{field.name: getattr(self, field.name) for field in fields(WeightSourceConfig)})


SINGLE_MODEL_KEYS = SubModelConfig.model_fields.keys() - {"model_id"}
"""Keys of ``model`` that a container leaves to its sub-models."""


class ModelConfig(SubModelConfig):
    """A container with ``models``, or a single model, which has the keys of a sub-model itself."""

    model_id: str
    """Name in the entry-point group mm_trainer.containers, or of mm_trainer.models for a single model."""
    task: str | None = None
    """Handed to the container, the models and the pipeline."""
    pipeline: str | None = None
    """Name in the entry-point group mm_trainer.pipelines; null: the container's own."""
    models: dict[str, SubModelConfig] | None = Field(default=None, min_length=1)
    """Sub-models by name; absent for a single model."""

    @model_validator(mode="after")
    def _check_container(self) -> Self:
        if self.models is None:
            for name, value in self.extras.items():
                if _holds_sub_models(value):
                    raise FieldError(name, "unknown key; sub-models stand under models")
            if self.pipeline is not None:
                raise FieldError("pipeline", "a single model has none; it computes its loss itself")
            return self
        declared = SubModelConfig.model_fields
        own = [name for name in declared if name in SINGLE_MODEL_KEYS and getattr(self, name) != declared[name].default]
        if own:
            raise FieldError(own[0], "belongs to one sub-model, under model.models.<name>, not to the container")
        return self

    @property
    def sub_models(self) -> dict[str, SubModelConfig]:
        """Sub-models by name; a single model is the one entry ``model``."""
        return {"model": self} if self.models is None else self.models

    def key_of(self, name: str) -> str:
        """Dotted key of a sub-model in the configuration."""
        return "model" if self.models is None else f"model.models.{name}"


def _holds_sub_models(value: Any) -> bool:
    """Whether a plugin's key looks like ``models`` misspelt."""
    return isinstance(value, dict) and any(isinstance(sub, dict) and "model_id" in sub for sub in value.values())
