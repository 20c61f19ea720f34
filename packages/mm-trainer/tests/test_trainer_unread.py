"""Options that nothing reads are refused by `check`, each with its key; and accepted where something reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from cfg_helpers import CONTAINER, SINGLE, write
from cfg_plugin import CfgModel

from mm_trainer.commands.prepare import Prepared, prepare
from mm_trainer.config import load_config
from mm_trainer.contracts import ClipFiles, ModelContainer, ModelSpec, Tokenizer
from mm_trainer.data.video.options import VideoOptions
from mm_trainer.engine.conditions import ConditionBatcher
from mm_trainer.errors import ConfigError
from mm_trainer.pipelines.flow_match import FlowMatchOptions, FlowMatchPipeline, SchedulerOptions
from mm_trainer.registry import register_clip_processor, register_container, register_model, register_pipeline

TOKENIZER = ["data.dataset_param.tokenizer=."]
VIDEO = [
    "data.dataset_param={dataset_type: video, data_path: ., num_frames: 5, buckets: [[48, 64]]}",
    "data.dataset_param.processor=unread_depth",
]


@register_clip_processor("unread_depth")
class Depth:
    columns = ("depth",)
    entries = ("depth", "depth_mask")

    def group(self, counts: Mapping[str, int]) -> int:
        return 0

    def process(self, video: torch.Tensor, files: ClipFiles) -> dict[str, torch.Tensor]:
        return {}


@register_model("unread_reader")
class Reader(CfgModel):
    """Reads all that a model can be told."""

    clip_entries = ("depth_mask", "pose")
    architectures = {"any": {}}

    @classmethod
    def from_config(cls, spec: ModelSpec) -> Self:
        {spec.attn_implementation, spec.task, spec.architecture}
        return super().from_config(spec)

    @classmethod
    def build_tokenizer(cls, path: str, spec: ModelSpec) -> Tokenizer:
        raise AssertionError("a check opens no tokenizer")


@register_pipeline("unread_flow")
class Flow(FlowMatchPipeline):
    clip_entries = ("depth",)


class FlowContainer(ModelContainer[FlowMatchOptions]):
    checkpoint_submodels = ("predictor",)
    pipeline_id = "unread_flow"


register_container("unread_container")(FlowContainer)


@register_container("unread_strict_container")
class StrictContainer(FlowContainer):
    @classmethod
    def validate_specs(cls, specs: Mapping[str, ModelSpec], options: FlowMatchOptions, task: str | None) -> None:
        assert task == "t2v"


def checked(folder: Path, text: str, overrides: list[str]) -> Prepared:
    return prepare(load_config(write(folder, text), overrides), 1, require_files=False)


FLOW = CONTAINER.replace("cfg_container", "unread_container").replace("  mode: plain\n", "")
REFUSED: dict[str, tuple[str, list[str], str]] = {
    "a task, single model": (SINGLE, ["model.task=t2v"], "model.task: nothing here reads a task, so 't2v'"),
    "a task, container": (FLOW, ["model.task=t2v"], "model.task: nothing here reads a task"),
    "shapes": (SINGLE, ["model.architecture={width: 3}"], "model.architecture: CfgModel doesn't read it"),
    "an attention kernel": (
        CONTAINER,
        ["model.models.encoder.attn_implementation=sdpa"],
        "model.models.encoder.attn_implementation: CfgModel doesn't read it",
    ),
    "a tokenizer": (SINGLE, TOKENIZER, "data.dataset_param.tokenizer: no part of the model has a tokenise step"),
    "a processor, single model": (
        SINGLE,
        VIDEO,
        "data.dataset_param.processor: 'unread_depth' adds depth, depth_mask, which no part of this model reads",
    ),
    "condition batching": (SINGLE, ["training.condition_mbs=2"], "training.condition_mbs: conditions are made by"),
}


@register_model("unread_loader")
class Loader(CfgModel):
    """Looks at its options only where it loads weights."""

    @classmethod
    def from_pretrained(cls, spec: ModelSpec) -> Self:
        assert spec.attn_implementation is not None
        return super().from_pretrained(spec)


ACCEPTED: dict[str, tuple[str, list[str]]] = {
    "all of a single model": (
        SINGLE,
        [
            "model.model_id=unread_reader",
            "model.task=t",
            "model.architecture=any",
            "model.attn_implementation=x",
            *TOKENIZER,
        ],
    ),
    "what is read while weights are loaded": (
        SINGLE,
        ["model.model_id=unread_loader", "model.meta_init=false", "model.attn_implementation=x"],
    ),
    "a task that a component reads": (FLOW, ["model.models.encoder.model_id=unread_reader", "model.task=t2v"]),
    "a task that the container reads": (FLOW, ["model.model_id=unread_strict_container", "model.task=t2v"]),
    "a tokenizer that a component reads": (FLOW, ["model.models.encoder.model_id=unread_reader", *TOKENIZER]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_nothing_reads_is_refused(tmp_path: Path, case: str) -> None:
    text, overrides, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, text, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_something_reads_is_accepted(tmp_path: Path, case: str) -> None:
    assert checked(tmp_path, *ACCEPTED[case]).structure is not None


@pytest.mark.parametrize("reader", ["model.model_id=unread_reader", None])
def test_a_processor_is_accepted_where_one_of_its_entries_is_read(tmp_path: Path, reader: str | None) -> None:
    """By a single model, or by a container's pipeline."""
    text, overrides = (SINGLE, [reader]) if reader else (FLOW, [])
    assert checked(tmp_path, text, overrides + VIDEO).structure is not None


def test_conditions_that_the_data_brings_along_are_not_batched() -> None:
    """A data set of latents: the encoders would find no clip to encode."""
    with pytest.raises(ConfigError, match="the data set brings its conditions along") as caught:
        list(ConditionBatcher([{"conditions": {}, "sample_key": torch.tensor([0])}], dict, every=2))
    assert caught.value.key == "training.condition_mbs"


def test_options_that_other_options_switch_off_are_refused() -> None:
    video: dict[str, Any] = {"data_path": Path("x"), "num_frames": 5}
    with pytest.raises(ValueError, match="aspect_tolerance: only read with max_pixels"):
        VideoOptions(**video, aspect_tolerance=0.2, buckets=((48, 64),))
    VideoOptions(**video, aspect_tolerance=0.2, max_pixels=4096)
    for changed in ({"mean": 0.5}, {"std": 2.0}):
        with pytest.raises(ValueError, match="only read by preset logit_normal"):
            SchedulerOptions(**changed)
        SchedulerOptions(preset="logit_normal", **changed)
