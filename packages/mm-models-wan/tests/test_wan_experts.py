"""Two experts in one run: who is trained when, and that the other one is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from wan_helpers import SEED, build_container, make_batch, make_spec

from mm_models_wan.container import Wan22Container
from mm_models_wan.options import Wan22Options
from mm_models_wan.pipeline import WanPipeline
from mm_models_wan.schedule import WanSchedulerOptions, build_schedule, expert_range
from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, parallelize
from mm_trainer.errors import ConfigError

BOTH = Wan22Options(expert="both")
SPECS = {
    "ae": make_spec("ae", "wan_video_vae"),
    "text_encoder": make_spec("text_encoder", "UMT5"),
    "predictor": make_spec("predictor", "wan2_2_predictor"),
    "predictor_2": make_spec("predictor_2", "wan2_2_predictor"),
}
STEPS = 6


def test_two_predictors_without_saying_so_are_refused() -> None:
    """B083."""
    with pytest.raises(ConfigError, match="set expert: both to train them in one run"):
        Wan22Container.validate_specs(SPECS, Wan22Options(expert="low"), "t2v")
    Wan22Container.validate_specs(SPECS, BOTH, "t2v")
    assert Wan22Container.checkpointed(SPECS) == ("predictor", "predictor_2")
    with pytest.raises(ConfigError, match="missing: predictor_2"):
        Wan22Container.validate_specs({k: v for k, v in SPECS.items() if k != "predictor_2"}, BOTH, "t2v")


def test_each_expert_has_its_own_range(tiny_wan: Path) -> None:
    container = build_container(tiny_wan, BOTH, predictor="transformer")
    assert container.checkpoint_submodels == ("predictor", "predictor_2")
    assert tuple(container.alternation.views()) == container.checkpoint_submodels
    spec = container.input_spec()
    assert (spec.frame_stride, spec.spatial_multiple, spec.text_length) == (4, 16, 512)
    described = container.pipeline.describe()["experts"]
    assert described["predictor"]["noise_range"] == [0.875, 1.0]
    assert described["predictor_2"]["noise_range"] == [0.0, 0.875]
    assert described["predictor"]["probability"] == pytest.approx(0.301)
    for name, (lo, hi) in (("predictor", (0.875, 1.0)), ("predictor_2", (0.0, 0.875))):
        container.pipeline.activate(name)
        sigma = container(**make_batch(tiny_wan, 3)).per_sample.sigma
        assert ((sigma >= lo) & (sigma <= hi)).all()


def test_swapped_folders_are_refused(tiny_wan: Path) -> None:
    with pytest.raises(ConfigError, match=r"predictor is the high-noise expert.*transformer_2 is the low-noise one"):
        build_container(tiny_wan, BOTH, predictor="transformer_2")


def test_an_export_takes_the_place_of_what_was_trained(tiny_wan: Path) -> None:
    """By the side of the boundary that the noise range is on; on both sides, by what the weights were."""
    whole = build_container(tiny_wan, BOTH, predictor="transformer")
    assert whole.export_folders(SPECS) == {"predictor": "transformer", "predictor_2": "transformer_2"}
    for noise_range, source, place in (
        ((0.9, 0.99), "transformer", "transformer"),
        ((0.0, 0.5), "transformer_2", "transformer_2"),
        ((0.2, 0.6), "transformer_2", "transformer_2"),
        ((0.5, 0.95), "transformer", "transformer"),
        ((0.5, 0.95), "transformer_2", "transformer_2"),
        ((0.5, 1.0), "transformer_2", "transformer_2"),
        ((0.0, 1.0), "transformer_2", "transformer_2"),
    ):
        single = build_container(tiny_wan, Wan22Options(noise_range=noise_range), predictor=source)
        assert single.export_folders(SPECS) == {"predictor": place}, (noise_range, source)


def test_a_range_without_noise_levels_is_refused(tiny_wan: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.noise_range: no point of the noise grid lies in the range"):
        build_container(tiny_wan, Wan22Options(noise_range=(0.0, 0.001)))
    with pytest.raises(ConfigError, match=r"model\.boundary: no point of the noise grid"):
        build_container(tiny_wan, Wan22Options(expert="low", boundary=0.001))


def pipeline(options: WanSchedulerOptions, boundary: float) -> WanPipeline:
    high, low = (build_schedule(options, expert_range(expert, boundary)) for expert in ("high", "low"))
    return WanPipeline({"predictor": high, "predictor_2": low}, seed=SEED)


@pytest.mark.parametrize(
    ("options", "boundary", "share"),
    [
        (WanSchedulerOptions(), 0.875, 0.301),
        (WanSchedulerOptions(preset="shift5"), 0.9, 0.358),
        (WanSchedulerOptions(preset="logit_normal", shift=3.0), 0.875, 0.1984),
    ],
)
def test_experts_are_drawn_with_their_natural_probability(
    options: WanSchedulerOptions, boundary: float, share: float
) -> None:
    drawn = pipeline(options, boundary)
    assert drawn.probabilities()["predictor"] == pytest.approx(share, abs=1e-4)
    picks = [drawn.draw_predictor(step) for step in range(4000)]
    deviation = (share * (1 - share) / 4000) ** 0.5
    assert abs(picks.count("predictor") / 4000 - share) < 4 * deviation


def test_the_draw_is_a_function_of_seed_and_step() -> None:
    first, second = (pipeline(WanSchedulerOptions(), 0.875) for _ in range(2))
    assert [first.draw_predictor(s) for s in range(50)] == [second.draw_predictor(s) for s in range(49, -1, -1)][::-1]


def run(container: Wan22Container, batch: dict[str, Any], only: str | None = None) -> dict[str, list[int]]:
    """Steps as the engine makes them, one optimizer per expert; ``only``: leave out the steps of the other one."""
    optimizers = {
        name: torch.optim.AdamW(getattr(container, name).parameters(), lr=1e-3)
        for name in container.checkpoint_submodels
    }
    trained: dict[str, list[int]] = {name: [] for name in optimizers}
    for step in range(STEPS):
        (name,) = container.alternation.begin(step)
        if only not in (None, name):
            continue
        container(**{**batch, "sample_key": batch["sample_key"] + 10 * step}).loss.backward()
        idle = next(other for other in optimizers if other != name)
        assert all(p.grad is None for p in getattr(container, idle).parameters())
        optimizers[name].step()
        optimizers[name].zero_grad(set_to_none=True)
        trained[name].append(step)
    return trained


@pytest.mark.numeric
def test_each_expert_equals_a_run_that_replays_its_steps(tiny_wan: Path) -> None:
    batch = make_batch(tiny_wan, 2)
    together = build_container(tiny_wan, BOTH, predictor="transformer")
    trained = run(together, batch)
    assert all(trained.values()), f"both experts have to be drawn in {STEPS} steps, got {trained}"
    for name in together.checkpoint_submodels:
        alone = build_container(tiny_wan, BOTH, predictor="transformer")
        run(alone, batch, only=name)
        for key, value in getattr(alone, name).state_dict().items():
            assert torch.equal(value, getattr(together, name).state_dict()[key]), (name, key)


def idle_rank(rank: int, world_size: int, folder: Path) -> tuple[list[str], bool]:
    """(predictors by step, whether the idle one stayed sharded throughout)."""
    container = build_container(folder, BOTH, predictor="transformer")
    container.ae.requires_grad_(False)
    container.text_encoder.requires_grad_(False)
    patterns = ("text_encoder", "predictor.blocks.{*}", "predictor_2.blocks.{*}")
    plan = FSDPPlan(apply_modules=patterns, ignored_modules=("ae",), param_dtype="fp32")
    mesh = ParallelMesh.build(MeshSizes(shard=world_size))
    parallelize(container, mesh=mesh, plan=plan, sub_models=container.get_sub_models())
    batch = make_batch(folder, 1)
    batch["sample_key"] = batch["sample_key"] + rank
    picks, sharded = [], True
    for step in range(STEPS):
        picks.extend(container.alternation.begin(step))
        container(**batch).loss.backward()
        idle = getattr(container, "predictor_2" if picks[-1] == "predictor" else "predictor")
        sharded &= all(isinstance(p, DTensor) for p in idle.parameters())
        sharded &= all(p.grad is None for p in idle.parameters())
        container.zero_grad(set_to_none=True)
    return picks, sharded


def test_ranks_agree_on_the_expert_and_the_idle_one_stays_sharded(tiny_wan: Path, run_ranks: Any) -> None:
    preload = ("diffusers.models.autoencoders.autoencoder_kl_wan", "transformers.models.umt5.modeling_umt5")
    (first, sharded), (second, also_sharded) = run_ranks(idle_rank, 2, tiny_wan, preload=preload)
    assert first == second
    assert set(first) == {"predictor", "predictor_2"}
    assert sharded
    assert also_sharded
