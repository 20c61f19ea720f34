"""The folders that the recipes refer to as ``${WAN}`` and ``${CLIPS}``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    """A tiny pipeline folder, and clips with their metadata."""

    pipeline: Path
    clips: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"WAN": str(self.pipeline), "CLIPS": str(self.clips)}
