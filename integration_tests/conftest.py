"""A tiny Wan2.2 pipeline folder and a data set of real clips, made once per session."""

from __future__ import annotations

import pytest
from workspace import Workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    from demo import write_clips

    from mm_models_wan.tiny import write_tiny_pipeline

    folder = tmp_path_factory.mktemp("workspace")
    made = Workspace(pipeline=folder / "wan", clips=folder / "clips")
    write_tiny_pipeline(made.pipeline)
    write_clips(made.clips)
    return made
