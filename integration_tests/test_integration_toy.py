"""The toy third-party plugin: installed like any other, trained with no change to the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from numbers_close import FP32_BLOCK, FP32_TRACE
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


# Every Linear a unit of its own: the casts that a unit needs can't be its parent's work.
LINEARS = (
    "*.head",
    "*.patch_embedding",
    "*.text_embedding",
    "*.blocks.{*}.out",
    "*.blocks.{*}.qkv",
    "*.blocks.{*}.ffn.{0-2}",
)


@pytest.mark.parametrize("units", [LINEARS[:1], LINEARS[1:2], LINEARS[3:4], LINEARS], ids="+".join)
def test_any_module_may_be_a_unit_in_bf16(run_ranks, tmp_path: Path, units: tuple[str, ...]) -> None:
    """The numbers are those of one unit for the whole predictor: where a unit ends changes no dtype."""
    bf16 = ["parallel.fsdp_plan.param_dtype=bf16", "training.train_iters=2"]
    traces = []
    for name, plan in (("whole", ()), ("units", units)):
        patterns = f"parallel.fsdp_plan.apply_modules=[{', '.join(repr(p) for p in plan)}]"
        overrides = [*bf16, patterns, f"training.save={tmp_path / name}"]
        traces.append(trace(run_ranks(train_rank, 2, {}, overrides, RECIPE)[0]))
    assert traces[0] == traces[1]


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


@pytest.mark.numeric
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
    np.testing.assert_allclose(trace(records), trace(whole[0]), rtol=FP32_TRACE)


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.ulysses_parallel_size=1",
        pytest.param("parallel.ulysses_parallel_size=2", marks=pytest.mark.numeric),
    ],
)
def test_condition_batching_changes_no_number(run_ranks, tmp_path: Path, layout: str) -> None:
    """Four, and three, micro-batches encoded together; over a context-parallel group each rank encodes its share."""
    import numpy as np

    common = [layout, "training.train_iters=4", "training.gradient_accumulation_steps=2", "training.micro_batch_size=1"]
    traces = {}
    for together in (1, 4, 3):
        settings = [*common, f"training.condition_mbs={together}", f"training.save={tmp_path / str(together)}"]
        traces[together] = trace(run_ranks(train_rank, 2, {}, settings, RECIPE)[0])
    np.testing.assert_allclose(traces[4], traces[1], rtol=FP32_BLOCK)
    np.testing.assert_allclose(traces[3], traces[1], rtol=FP32_BLOCK)


def encode_unequal_windows(rank: int, world_size: int) -> list[int]:
    """Rank 0's window falls into three stacks, rank 1's into one; returns the batches of each encoder call."""
    import torch
    import torch.distributed as dist

    from mm_trainer.engine.conditions import ConditionBatcher

    widths = [3, 4, 5] if rank == 0 else [3, 3, 3]
    window = [{"video": torch.full((1, w), float(w)), "sample_key": torch.tensor([i])} for i, w in enumerate(widths)]
    calls = []

    def prepare(stacked):
        calls.append(len(stacked["sample_key"]))
        dist.barrier()  # as the all-gather of a sharded encoder: every rank must come equally often
        return {"latents": stacked["video"].sum(1)}

    encoded = list(ConditionBatcher(window, prepare, every=3))
    assert [float(batch["conditions"]["latents"]) for batch in encoded] == [float(w * w) for w in widths]
    return calls


def test_ranks_with_fewer_shapes_call_the_encoders_as_often(run_ranks) -> None:
    """Otherwise a sharded text encoder would wait for ever."""
    assert run_ranks(encode_unequal_windows, 2, timeout=30) == [[1, 1, 1], [3, 3, 3]]
