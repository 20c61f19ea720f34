"""Which weights a configuration means is settled once: while it is bound."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from rank_training import PRELOAD, RECIPE
from test_integration_training import settings
from workspace import Workspace


def count_look_ups(rank: int, world_size: int, environ: dict[str, str], overrides: list[str]) -> list[str]:
    """Bind, build, load, train a step and save; where were weights looked for?"""
    from mm_checkpoint import WeightSource
    from mm_checkpoint._weights import sources
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    os.environ.update(environ)
    config = resolve(load_config(RECIPE, overrides), world_size)
    looked_up: list[str] = []
    find = sources.find_source

    def counting(path: Path, *rest: str) -> WeightSource:
        looked_up.append(path.name)
        return find(path, *rest)

    # `resolve_source` finds everything through this name, whoever calls it and however that was imported.
    with patch.object(sources, "find_source", counting):
        bound = bind(config)
        while_binding = len(looked_up)
        engine = make_engine(Prepared(config, bound), ParallelMesh.build(config.mesh, device_type="cpu"))
        with engine.services.metrics:
            engine.train()
    assert len(looked_up) == while_binding
    return looked_up


def test_every_source_is_looked_up_once(run_ranks, workspace: Workspace, tmp_path: Path) -> None:
    overrides = settings(tmp_path / "run", steps=1, micro=1)
    looked_up = run_ranks(count_look_ups, 1, workspace.environ, overrides, preload=PRELOAD)[0]
    assert sorted(looked_up) == ["text_encoder", "transformer_2", "vae"]
