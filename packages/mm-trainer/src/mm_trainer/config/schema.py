"""The six sections as one type, and the configuration objects that the rest of the package sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from mm_parallel.config import FeaturesConfig, ParallelConfig
from mm_parallel.sizes import MeshSizes
from mm_trainer.config.sections.data import DataConfig
from mm_trainer.config.sections.fields import Section, all_keys
from mm_trainer.config.sections.model import ModelConfig
from mm_trainer.config.sections.training import ToolsConfig, TrainingConfig
from mm_trainer.config.yaml.document import Document


class Sections(Section):
    """A configuration file of mm-trainer."""

    parallel: ParallelConfig = ParallelConfig()
    """How parameters, batch and sequence are split over ranks."""
    model: ModelConfig
    """What is trained, and which frozen models go with it."""
    data: DataConfig
    """What it is trained on."""
    training: TrainingConfig
    """How long, with which optimizer, and what is written when."""
    tools: ToolsConfig = ToolsConfig()
    """Profiles and metric sinks."""
    features: FeaturesConfig = FeaturesConfig()
    """What trades compute or bandwidth for memory."""


@dataclass(frozen=True)
class TrainerConfig:
    """A configuration that is right by itself: every key known, every value of its type.

    Args:
        document: what it was read from; errors find their file and line in it.
    """

    parallel: ParallelConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    tools: ToolsConfig
    features: FeaturesConfig
    document: Document = field(repr=False, compare=False)

    def sections(self) -> dict[str, Any]:
        """Section name → section."""
        return {name: getattr(self, name) for name in Sections.model_fields}


@dataclass(frozen=True)
class ResolvedConfig(TrainerConfig):
    """A configuration for a number of ranks: every ``auto`` that follows from it is settled.

    Args:
        world_size: all ranks.
        mesh: how they are factored.
    """

    world_size: int
    mesh: MeshSizes

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that each see samples of their own."""
        return self.mesh.data


@cache
def section_keys() -> tuple[str, ...]:
    """Every dotted key of the six sections."""
    return tuple(all_keys(Sections))


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, for editors; keys of plugins are admitted unseen."""
    schema = TypeAdapter(Sections).json_schema()
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "File (relative to this one) or recipe:NAME that this configuration builds on.",
    }
    return schema
