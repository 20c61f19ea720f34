"""The toy third-party plugin: installed like any other, trained with no change to the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rank_training import trace, train_rank

RECIPE = "recipe:toy/squares"


@pytest.mark.parametrize("layout", [[], ["parallel.ulysses_parallel_size=2"], ["parallel.ring_attention_size=2"]])
def test_it_trains_three_steps_on_two_ranks(run_ranks, tmp_path: Path, layout: list[str]) -> None:
    """Under context parallelism too: its model only asks for a shard of the sequence."""
    overrides = [f"training.save={tmp_path}", *layout]
    records = run_ranks(train_rank, 2, {}, overrides, RECIPE)[0]
    losses = trace(records)
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == 3
    assert (tmp_path / "iter_0000003" / "manifest.json").is_file()


def test_its_key_map_loads_published_weights(run_ranks, tmp_path: Path) -> None:
    """Weights under published names fill the model; the first loss so differs from that of a random start."""
    folder = write_published_weights(tmp_path / "published")
    random = run_ranks(train_rank, 1, {}, [f"training.save={tmp_path / 'random'}"], RECIPE)[0]
    overrides = [f"training.save={tmp_path / 'run'}", f"model.models.predictor.from_pretrained={folder}"]
    loaded = run_ranks(train_rank, 1, {}, overrides, RECIPE)[0]
    # All weights are zero but the head's bias of 0.5, so the first prediction is 0.5 everywhere.
    assert trace(loaded)[0] != trace(random)[0]


def write_published_weights(folder: Path) -> Path:
    import json

    import torch
    from mm_models_toy.models import ToyPredictor
    from safetensors.torch import save_file

    from mm_checkpoint import get_key_map

    folder.mkdir()
    architecture = dict(ToyPredictor.architectures["toy-small"])
    (folder / "config.json").write_text(json.dumps(architecture), encoding="utf-8")
    key_map = get_key_map("toy")
    tensors = {}
    for name, parameter in ToyPredictor(**architecture).named_parameters():
        value = torch.full_like(parameter, 0.5 if name == "head.bias" else 0.0)
        tensors[key_map.to_source(name)] = value.detach()
    assert "layers.1.feed_forward.0.weight" in tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_resume_on_other_ranks_goes_on_with_the_same_samples(run_ranks, tmp_path: Path) -> None:
    """2 → 4 → 1 ranks under `gradient_accumulation_steps: auto`: the trace of an unbroken run, to rounding."""
    import numpy as np

    common = [
        "training.micro_batch_size=1",
        "training.global_batch_size=4",
        "training.gradient_accumulation_steps=auto",
        "training.save_interval=4",
        "training.ema.enable=true",
    ]
    whole = run_ranks(
        train_rank, 1, {}, [f"training.save={tmp_path / 'whole'}", *common, "training.train_iters=12"], RECIPE
    )
    moving = [f"training.save={tmp_path / 'moving'}", *common, "training.load=auto"]
    for ranks, steps in ((2, 4), (4, 8), (1, 12)):
        records = run_ranks(train_rank, ranks, {}, [*moving, f"training.train_iters={steps}"], RECIPE)[0]
    assert [record["step"] for record in records] == list(range(1, 13))
    np.testing.assert_allclose(trace(records), trace(whole[0]), rtol=1e-4)
