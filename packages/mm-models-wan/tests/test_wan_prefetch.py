"""Gathers across sub-models: early, in order, and not one more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from wan_helpers import build_container, make_batch

from mm_models_wan.options import Wan22Options
from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, parallelize, reset_frozen
from mm_trainer.contracts import StepContext

PRELOAD = ("diffusers.models.autoencoders.autoencoder_kl_wan", "transformers.models.umt5.modeling_umt5")
STEPS = 2


def mark(module: Any, args: Any) -> None:
    with record_function("ae"):
        pass


def traced(rank: int, world_size: int, folder: Path, ahead: bool) -> tuple[list[list[str]], list[float]]:
    """Per step FSDP2's events and the VAE's start, in order, and the losses."""
    container = build_container(folder, Wan22Options(expert="low"))
    container.ae.requires_grad_(False)
    container.text_encoder.requires_grad_(False)
    patterns = ("text_encoder.model.encoder.block.{*}", "predictor.blocks.{*}", "predictor.head")
    plan = FSDPPlan(apply_modules=patterns, ignored_modules=("ae",), param_dtype="fp32")
    mesh = ParallelMesh.build(MeshSizes(shard=world_size))
    parallelize(container, mesh=mesh, plan=plan, sub_models=container.get_sub_models())
    container.set_step_context(StepContext(cross_submodel_prefetch=ahead))
    container.ae.register_forward_pre_hook(mark)
    optimizer = torch.optim.SGD(container.predictor.parameters(), lr=0.1)
    batch = make_batch(folder, 1)
    steps, losses = [], []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            loss = container(**batch).loss
        events = sorted(recorded.events(), key=lambda event: event.time_range.start)
        steps.append([event.name for event in events if event.name == "ae" or event.name.startswith("FSDP::")])
        reset_frozen(container.text_encoder)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return steps, losses


def gathers(events: list[str]) -> int:
    return sum(name.startswith("FSDP::all_gather") and "copy_out" not in name for name in events)


def test_gathers_run_under_the_sub_model_before(tiny_wan: Path, run_ranks: Any) -> None:
    """Root and first block of the text encoder before the VAE runs, those of the predictor before the text encoder:
    from the first step on, and with no gather more than without."""
    (ahead, losses), _ = run_ranks(traced, 2, tiny_wan, True, preload=PRELOAD)
    (plain, expected), _ = run_ranks(traced, 2, tiny_wan, False, preload=PRELOAD)
    assert losses == expected, "weights gathered early must not be stale"
    for events, usual in zip(ahead, plain, strict=True):
        encoder_starts = events.index("FSDP::root_pre_forward")
        assert gathers(events[: events.index("ae")]) == 2
        assert gathers(events[events.index("ae") : encoder_starts]) == 2
        assert gathers(usual[: usual.index("FSDP::root_pre_forward")]) == 0
        assert gathers(events) == gathers(usual)
