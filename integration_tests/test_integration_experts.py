"""Both experts in one run: who is trained when, and that each gets what a run of its own would have given it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rank_training import PRELOAD, RECIPE, read_checkpoint, read_metrics, train_rank
from safetensors.torch import load_file
from test_integration_training import settings
from workspace import Workspace

from mm_parallel import ParallelMesh
from mm_trainer.commands.prepare import Prepared
from mm_trainer.commands.train import make_engine
from mm_trainer.config import bind, load_config, resolve
from mm_trainer.engine.loop import TrainEngine
from mm_trainer.metrics.window import LogWindow

RANKS, STEPS = 4, 10
FILE = "diffusion_pytorch_model.safetensors"
CONFIG = """
extends: recipe:wan2_2/tiny_t2v
model:
  expert: both
  models:
    predictor: {{from_pretrained: "{pipeline}/transformer"}}
    predictor_2: {{model_id: wan2_2_predictor, from_pretrained: "{pipeline}/transformer_2"}}
parallel:
  fsdp_plan:
    apply_modules: ["text_encoder", "predictor.blocks.{{*}}", "predictor_2.blocks.{{*}}"]
features:
  recompute_plan: {{apply_modules: ["predictor.blocks.{{*}}", "predictor_2.blocks.{{*}}"]}}
"""


@pytest.fixture(scope="module")
def config(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("both") / "both.yaml"
    path.write_text(CONFIG.format(pipeline=workspace.pipeline), encoding="utf-8")
    return str(path)


def open_engine(world_size: int, environ: dict[str, str], overrides: Sequence[str], recipe: str) -> TrainEngine:
    os.environ.update(environ)
    config = resolve(load_config(recipe, overrides), world_size)
    return make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))


def train_until(
    rank: int, world_size: int, environ: dict[str, str], overrides: Sequence[str], recipe: str, last: int
) -> None:
    """Train, end after step ``last`` and save, with the schedule of the whole run."""
    engine = open_engine(world_size, environ, overrides, recipe)
    engine.total_steps = last
    with engine.services.metrics:
        engine.train()


def replay(rank: int, world_size: int, environ: dict[str, str], overrides: Sequence[str], steps: Sequence[int]) -> None:
    """A run of one expert that makes these steps only: of the others it takes the data and counts the number."""
    engine = open_engine(world_size, environ, overrides, RECIPE)
    window = LogWindow(engine.mesh)
    for step in range(STEPS):
        if step in steps:
            engine.train_step(window)
        else:
            next(engine.batches)
            engine.progress.step += 1
    assert engine.services.checkpoints is not None
    engine.services.checkpoints.save(engine.progress, engine.services.data_state())


@pytest.mark.slow
def test_each_expert_equals_a_run_that_replays_its_steps(
    run_ranks, workspace: Workspace, config: str, tmp_path: Path
) -> None:
    """Stopped and resumed half-way, on four ranks: weights, moments and step counts to the bit, and so the exports."""
    common = {"training.lr_decay_style": "cosine", "training.lr_warmup_iters": 3, "data.dataset_param.num_frames": 9}
    both = tmp_path / "both"
    overrides = settings(both, steps=STEPS, micro=1, **common)
    run_ranks(train_until, RANKS, workspace.environ, overrides, config, STEPS // 2, preload=PRELOAD)
    assert [path.name for path in both.glob("iter_*")] == [f"iter_{STEPS // 2:07d}"]
    run_ranks(train_rank, RANKS, workspace.environ, [*overrides, "training.load=auto"], config, preload=PRELOAD)

    steps = trained_steps(both)
    middle = STEPS // 2
    assert all(min(own) < middle <= max(own) for own in steps.values()), "each expert's steps lie on both sides"
    together = read_checkpoint(both / f"iter_{STEPS:07d}")
    exported = {path.name: load_file(path / FILE) for path in export_run(both)}
    assert sorted(exported) == ["transformer", "transformer_2"]

    for name, expert, folder in (("predictor", "high", "transformer"), ("predictor_2", "low", "transformer_2")):
        run = tmp_path / expert
        source = {"model.expert": expert, "model.models.predictor.from_pretrained": workspace.pipeline / folder}
        single = settings(run, steps=STEPS, micro=1, **common, **source)
        run_ranks(replay, RANKS, workspace.environ, single, steps[name], preload=PRELOAD)
        alone = read_checkpoint(run / f"iter_{STEPS:07d}")
        assert int(alone["optimizer.predictor.patch_embedding.bias.step"]) == len(steps[name])
        for key, tensor in alone.items():
            part, _, rest = key.partition(".predictor.")
            if rest:
                assert torch.equal(tensor, together[f"{part}.{name}.{rest}"]), (expert, key)
        (path,) = export_run(run)
        assert path.name == folder
        weights = load_file(path / FILE)
        assert weights.keys() == exported[folder].keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, exported[folder][key]), (folder, key)
        before = load_file(workspace.pipeline / folder / FILE)
        assert any(not torch.equal(tensor, before[key]) for key, tensor in weights.items()), "nothing was trained"


def export_run(run: Path) -> list[Path]:
    from mm_checkpoint import export

    return export(run, run / "exported")


def trained_steps(run: Path) -> dict[str, list[int]]:
    """Predictor's name → the steps that trained it, counted from 0, by the run's own figures: one expert a step, at
    noise levels of its range."""
    steps: dict[str, list[int]] = {"predictor": [], "predictor_2": []}
    for index, record in enumerate(read_metrics(run)):
        assert record["step"] == index + 1
        (name,) = [name for name in steps if f"loss_{name}" in record]
        steps[name].append(index)
        sigmas = [float(key.rsplit("_", 1)[1]) for key in record if key.startswith("loss_sigma")]
        assert max(sigmas) <= 0.8 and (name == "predictor_2" or min(sigmas) == 0.8), "0.875 lies in [0.8, 1)"
    return steps


@pytest.mark.slow
def test_from_scratch_and_with_an_average_it_exports_what_diffusers_loads(
    run_ranks, workspace: Workspace, tmp_path: Path
) -> None:
    """The shapes come from `architecture` alone; the pipeline's folder is named after the expert."""
    import json

    import torch
    from diffusers import WanTransformer3DModel

    shapes = json.loads((workspace.pipeline / "transformer_2" / "config.json").read_text(encoding="utf-8"))
    inline = {key: value for key, value in shapes.items() if not key.startswith("_")}
    path = tmp_path / "scratch.yaml"
    path.write_text(
        json.dumps(
            {
                "extends": "recipe:wan2_2/tiny_t2v",
                "model": {
                    "boundary": 0.875,
                    "models": {"predictor": {"from_pretrained": None, "architecture": inline}},
                },
                "training": {"ema": {"enable": True, "decay": 0.5}},
            }
        ),
        encoding="utf-8",
    )
    overrides = settings(tmp_path / "run", steps=2, micro=2)
    run_ranks(train_rank, 1, workspace.environ, overrides, str(path), preload=PRELOAD)

    from mm_checkpoint import export

    weights, average = (
        export(tmp_path / "run", tmp_path / f"exported-{ema}", ema=ema, base=workspace.pipeline)
        for ema in (False, True)
    )
    assert [folder.name for folder in weights] == ["transformer_2"]
    state, averaged = (dict(WanTransformer3DModel.from_pretrained(f[0]).state_dict()) for f in (weights, average))
    assert not any(torch.isnan(tensor).any() for tensor in averaged.values())
    assert any(not torch.equal(state[name], averaged[name]) for name in state)
