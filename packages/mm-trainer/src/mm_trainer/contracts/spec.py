"""What passes between the configuration and the models. Free of torch, so that `check` can read it early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict
from typing_extensions import TypeVar

from mm_checkpoint.config import WeightSourceConfig

if TYPE_CHECKING:
    from mm_checkpoint import WeightSource


class Options(PydanticModel):
    """Base of a plugin's own configuration class: strict and frozen.

    A model or container class names its subclass as its type argument (``BaseModel[MyOptions]``); the keys of the YAML
    section that the framework doesn't know are validated by it, so an unknown key is refused with its line like any
    other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NoOptions(Options):
    """For models and containers that add no key of their own."""


OptionsT = TypeVar("OptionsT", bound=Options, default=Any)
"""The options class of a plugin; not stated: any."""


@dataclass(frozen=True)
class InputSpec:
    """What one model asks of a clip before it can be fed to it; a container's is the merge of its components'.

    A clip of ``frames`` × ``height`` × ``width`` pixels fits if ``frames = frame_stride·k + 1`` and both sides are
    multiples of ``spatial_multiple``.
    """

    frame_stride: int = 1
    """Pixel frames per latent frame after the first; 1 for a model that has no frame rule."""
    spatial_multiple: int = 1
    """Height and width must be multiples of this many pixels."""
    text_length: int | None = None
    """Tokens that a prompt is padded or cut to."""

    @classmethod
    def merge(cls, specs: Iterable[InputSpec]) -> InputSpec:
        """Chain the models of one container: strides and multiples multiply, the text length is the one stated.

        Strides multiply because the models work on each other's output: a VAE of stride 8 in front of a transformer
        with patches of 2 asks for multiples of 16 pixels.
        """
        frame_stride, spatial_multiple, text_length = 1, 1, None
        for spec in specs:
            frame_stride *= spec.frame_stride
            spatial_multiple *= spec.spatial_multiple
            if spec.text_length is not None:
                if text_length not in (None, spec.text_length):
                    raise ValueError(f"two models ask for different text lengths: {text_length} and {spec.text_length}")
                text_length = spec.text_length
        return cls(frame_stride=frame_stride, spatial_multiple=spatial_multiple, text_length=text_length)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Length of the token sequence that a clip of this many pixels becomes."""
        latent_frames = (frames - 1) // self.frame_stride + 1
        return latent_frames * (height // self.spatial_multiple) * (width // self.spatial_multiple)


@dataclass(frozen=True)
class ModelSpec(Generic[OptionsT]):
    """One sub-model as the configuration describes it, every default settled."""

    name: str
    """Name of the component in its container (``predictor``), or ``model`` on the single-model path."""
    model_id: str
    source: WeightSourceConfig
    """The weights as the configuration names them."""
    weights: WeightSource | None
    """The weights as found there, looked up once when the configuration was bound; None where it names none, or, for a
    check without files, none that is here (`BoundConfig.without_source` tells which)."""
    dtype: str = "fp32"
    """dtype of the stored parameters: fp32, bf16 or fp16. The compute dtype is the FSDP plan's."""
    meta_init: bool = True
    freeze: bool | tuple[str, ...] = False
    architecture: str | Mapping[str, Any] | None = None
    attn_implementation: str | None = None
    task: str | None = None
    seed: int = 0
    """``training.seed``: with the ``sample_key`` of a batch the key of all randomness of a sample."""
    options: OptionsT = field(default_factory=NoOptions)  # type: ignore[assignment]  # of models that have none
    """Instance of the model class's ``Options``: the keys only this model knows."""

    @property
    def key(self) -> str:
        """Dotted key of this sub-model's section in the configuration, for messages."""
        return "model" if self.name == "model" else f"model.models.{self.name}"
