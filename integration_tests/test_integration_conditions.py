"""Conditions encoded for several micro-batches at once: the same features, and a quarter of the gathers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from numbers_close import FP32_BLOCK, assert_near
from rank_training import PRELOAD, RECIPE
from test_integration_training import settings
from torch import Tensor
from workspace import Workspace

from mm_parallel import ParallelMesh, count_communication
from mm_trainer.commands.prepare import Prepared
from mm_trainer.commands.train import make_engine
from mm_trainer.config import bind, load_config, resolve
from mm_trainer.metrics.window import LogWindow

STEPS, ACCUMULATE = 2, 4
PROMPTS = [
    "A cat",
    "Two dogs",
    "Rain",
    "A street at night",
    "People",
    "A rabbit in a meadow",
    "A long, slow river",
    "Sea",
]


@dataclass
class Seen:
    """What a rank's encoders did, and what its predictor was given."""

    calls: int = 0
    gathers: int = 0
    seconds: float = 0.0
    features: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sample key → text features and latents."""
    prompt_lengths: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train_and_watch(rank: int, world_size: int, environ: dict[str, str], overrides: Sequence[str]) -> Seen:
    os.environ.update(environ)
    config = resolve(load_config(RECIPE, overrides), world_size)
    mesh = ParallelMesh.build(config.mesh, device_type="cpu")
    engine = make_engine(Prepared(config, bind(config)), mesh, dry_run=True)
    seen, pipeline = Seen(), engine.model.pipeline
    prepare, noising = pipeline.prepare_conditions, pipeline.noising

    def counted(components: Any, context: Any, batch: Any) -> Any:
        started = time.perf_counter()
        with count_communication(mesh) as communication:
            conditions = prepare(components, context, batch)
        seen.calls += 1
        seen.seconds += time.perf_counter() - started
        seen.gathers += communication.total(kind="all_gather").calls
        return conditions

    def watched(components: Any, context: Any, conditions: Any, batch: Any) -> Any:
        for row, key in enumerate(batch["sample_key"].tolist()):
            seen.features[key] = conditions["context"][row].clone(), conditions["latents"][row].clone()
        seen.prompt_lengths += batch["prompt_mask"].sum(1).tolist()
        return noising(components, context, conditions, batch)

    pipeline.prepare_conditions, pipeline.noising = counted, watched
    for _ in range(STEPS):
        window = LogWindow(mesh)
        engine.train_step(window)
        seen.losses.append(window.close(0.0)["loss"])
    return seen


def write_metadata(workspace: Workspace, path: Path) -> Path:
    """Eight prompts, no two of one length, over the four clips."""
    clips = sorted(file.name for file in workspace.clips.glob("*.mp4"))
    rows = [f'{clips[index % len(clips)]},"{prompt}"' for index, prompt in enumerate(PROMPTS)]
    path.write_text("\n".join(["video,prompt", *rows]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="data"),
        pytest.param({"parallel.ulysses_parallel_size": 2}, id="context", marks=pytest.mark.numeric),
    ],
)
def test_four_micro_batches_at_once_change_no_number_and_gather_a_quarter(
    run_ranks, workspace: Workspace, tmp_path: Path, layout: dict[str, int]
) -> None:
    """The text encoder is sharded, the VAE is not: the gathers of `prepare_conditions` are the text encoder's. Ranks
    that share a sequence encode half of the four each."""
    units = '["text_encoder.model.encoder.block.{*}","predictor.blocks.{*}"]'
    changes = {
        "parallel.fsdp_plan.apply_modules": units,
        "data.dataset_param.num_frames": 9,
        "data.dataset_param.data_path": write_metadata(workspace, tmp_path / "metadata.csv"),
        **layout,
    }
    seen = {}
    for together in (1, 4):
        overrides = settings(
            tmp_path,
            steps=STEPS,
            micro=1,
            accumulate=ACCUMULATE,
            **changes,
            **{"training.condition_mbs": together},
        )
        seen[together] = run_ranks(train_and_watch, 2, workspace.environ, overrides, preload=PRELOAD)
    for one, four in zip(seen[1], seen[4], strict=True):
        assert len(set(four.prompt_lengths[:4])) == 4, "four prompts of different lengths in the first batch"
        assert (one.calls, four.calls) == (STEPS * ACCUMULATE, STEPS)
        assert one.gathers == 4 * four.gathers == 3 * one.calls, "two blocks and the rest"
        assert one.features.keys() == four.features.keys()
        for key, (context, latents) in one.features.items():
            assert_near(four.features[key][0], context, FP32_BLOCK, "text")
            assert_near(four.features[key][1], latents, FP32_BLOCK, "latents")
        assert four.losses == pytest.approx(one.losses, rel=FP32_BLOCK)
