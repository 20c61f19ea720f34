"""Frozen sub-models: never changed, never in a checkpoint, loaded from their own source also on a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rank_training import PRELOAD, RECIPE
from workspace import Workspace

SETTINGS = [
    "training.train_iters=2",
    "training.micro_batch_size=2",
    "training.val_interval=0",
    "training.save_async=false",
    "data.dataloader_param.num_workers=0",
]


def full_state(model: Any) -> dict[str, Any]:
    """Whole tensors of one sub-model, by name."""
    from torch.distributed.tensor import DTensor

    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def train_and_compare(rank: int, world_size: int, environ: dict[str, str], overrides: list[str]) -> dict[str, Any]:
    """Train two steps and report which sub-models changed, and whether the frozen ones equal their own folders."""
    import torch
    from safetensors.torch import load_file

    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    os.environ.update(environ)
    config = resolve(load_config(RECIPE, overrides), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    models = engine.model.get_sub_models()
    before = {name: full_state(model) for name, model in models.items()}
    first_step = engine.progress.step
    with engine.services.metrics:
        engine.train()
    after = {name: full_state(model) for name, model in models.items()}
    encoder = load_file(next(Path(environ["WAN"], "text_encoder").glob("*.safetensors")))
    loaded = {name.removeprefix("model."): tensor for name, tensor in before["text_encoder"].items()}
    return {
        "first_step": first_step,
        "changed": {
            name: [key for key in after[name] if not torch.equal(before[name][key], after[name][key])]
            for name in models
        },
        "training_mode": {name: model.training for name, model in models.items()},
        "encoder_differs": [key for key, tensor in encoder.items() if not torch.equal(loaded[key], tensor)],
        "encoder_keys": len(encoder),
    }


@pytest.fixture(scope="module")
def first_run(run_ranks, workspace: Workspace, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    run = tmp_path_factory.mktemp("frozen") / "run"
    overrides = [*SETTINGS, f"training.save={run}"]
    return run, run_ranks(train_and_compare, 2, workspace.environ, overrides, preload=PRELOAD)


def test_frozen_sub_models_stay_bit_for_bit(first_run) -> None:
    for outcome in first_run[1]:
        assert outcome["changed"]["ae"] == []
        assert outcome["changed"]["text_encoder"] == []
        assert len(outcome["changed"]["predictor"]) > 10
        assert outcome["training_mode"] == {"ae": False, "text_encoder": False, "predictor": True}


def test_the_checkpoint_holds_the_predictor_only(first_run) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(first_run[0] / "iter_0000002").read_metadata().state_dict_metadata
    models = {name.split(".")[1] for name in names if name.startswith("model.")}
    optimizers = {name.split(".")[1] for name in names if name.startswith("optimizer.")}
    assert models == optimizers == {"predictor"}


def test_a_resumed_run_has_its_text_encoder_from_its_own_folder(
    run_ranks, workspace: Workspace, first_run, tmp_path: Path
) -> None:
    run, _ = first_run
    overrides = [*SETTINGS, f"training.save={tmp_path}", f"training.load={run}", "training.train_iters=3"]
    for outcome in run_ranks(train_and_compare, 2, workspace.environ, overrides, preload=PRELOAD):
        assert outcome["first_step"] == 2
        assert outcome["encoder_keys"] > 10
        assert outcome["encoder_differs"] == []
        assert outcome["changed"]["text_encoder"] == []


def count_loads(rank: int, world_size: int, environ: dict[str, str], overrides: list[str]) -> dict[str, int]:
    """How often the tensors of each weight folder are opened on this rank while everything is built."""
    from mm_checkpoint import WeightSource
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    os.environ.update(environ)
    opened: dict[str, int] = {}
    original = WeightSource.open

    def counting(source: Any) -> Any:
        opened[source.path.name] = opened.get(source.path.name, 0) + 1
        return original(source)

    WeightSource.open = counting
    config = resolve(load_config(RECIPE, overrides), world_size)
    make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    return opened


def test_every_weight_folder_is_opened_once_per_rank(run_ranks, workspace: Workspace, tmp_path: Path) -> None:
    overrides = [*SETTINGS, f"training.save={tmp_path}"]
    for opened in run_ranks(count_loads, 2, workspace.environ, overrides, preload=PRELOAD):
        assert opened == {"vae": 1, "text_encoder": 1, "transformer_2": 1}
