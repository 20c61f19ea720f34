"""Every task on several ranks trains as on one: context parallelism, sharding and sub-plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_close import BF16_GRADIENT, FP32_BLOCK, FP32_GRADIENT, assert_near, gradient_scales
from wan_helpers import build_container, make_batch, model_inputs, model_pair, scramble

from mm_models_wan.options import Wan22Options
from mm_parallel import (
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    RecomputePlan,
    SubPlan,
    apply_features,
    clip_grad_norm,
    parallelize,
    reset_frozen,
)

pytestmark = pytest.mark.numeric

PRELOAD = ("diffusers.models.autoencoders.autoencoder_kl_wan", "transformers.models.umt5.modeling_umt5")
TASKS = ("t2v", "i2v", "ti2v")
STEPS = 2
# 3 latent frames of 2×4 (t2v, i2v) or 1×2 (ti2v) tokens: 24 and 6, which 4 ranks don't divide.
FRAMES = 9
# Of 512 text positions all but a prompt's 7 or 19 are zero, and their keys equal. Weights that decide between keys get
# what is left of sums over all of them, with the rounding of the whole sums.
SHORT_TEXT = (512 / 7) ** 0.5
TEXT_WEIGHTS = re.compile(r"\.(norm3|cross_attn\.(norm_)?[qk])\.")

SUB_PLANS = {"text_encoder": SubPlan(shard_size=2), "predictor": SubPlan(shard_size=4, trainable=True)}
LAYOUTS: dict[str, tuple[int, MeshSizes, Mapping[str, SubPlan], bool]] = {
    "u2": (2, MeshSizes(shard=2, ulysses=2), {}, False),
    "r2, recompute": (2, MeshSizes(shard=2, ring=2), {}, True),
    "u2r2": (4, MeshSizes(shard=4, ulysses=2, ring=2), {}, False),
    "sub-plans, dp2 u2, recompute": (4, MeshSizes(shard=4, ulysses=2), SUB_PLANS, True),
}


def train(folder: Path, task: str, mesh: ParallelMesh | None, layout: str) -> dict[str, Any]:
    """Two steps on a global batch of 2: losses, gradient norms and the first step's gradients."""
    name = "transformer" if task == "ti2v" else "transformer_2"
    container = build_container(folder, Wan22Options(noise_range=(0.1, 0.9)), task=task, predictor=name)
    scramble(container.predictor, 0)
    subs = container.get_sub_models()
    subs["ae"].requires_grad_(False)
    subs["text_encoder"].requires_grad_(False)
    container.train()
    batch = make_batch(folder, 2, frames=FRAMES)
    if mesh is not None:
        _, _, sub_plans, recompute = LAYOUTS[layout]
        container.predictor.set_context_parallel(mesh.context_parallel())
        blocks = ("predictor.blocks.{*}",)
        apply_features(
            container, FeaturesConfig(recompute=recompute, recompute_plan=RecomputePlan(apply_modules=blocks))
        )
        plan = FSDPPlan(
            apply_modules=("text_encoder", "predictor.blocks.{*}", "predictor.head"),
            ignored_modules=("ae",),
            param_dtype="fp32",
            sub_plans=dict(sub_plans),
        )
        parallelize(container, mesh=mesh, plan=plan, sub_models=subs)
        mine = slice(mesh.data_rank * 2 // mesh.data_size, (mesh.data_rank + 1) * 2 // mesh.data_size)
        batch = {key: value[mine] for key, value in batch.items()}
    optimizer = torch.optim.SGD(container.predictor.parameters(), lr=0.05)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        loss = container(**{**batch, "sample_key": batch["sample_key"] + 100 * step}).loss
        if mesh is not None:
            reset_frozen(subs["text_encoder"])
        loss.backward()
        gradients = gradients or {n: full(p.grad) for n, p in container.predictor.named_parameters()}
        norms.append(clip_grad_norm(container.predictor.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.detach(), mesh).item())
    return {"losses": losses, "norms": norms, "gradients": gradients}


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.clone()


def mean_over_ranks(value: torch.Tensor, mesh: ParallelMesh | None) -> torch.Tensor:
    if mesh is None:
        return value
    value = value / torch.distributed.get_world_size()
    torch.distributed.all_reduce(value)
    return value


def train_rank(rank: int, world_size: int, folders: dict[str, Path], layout: str) -> dict[str, dict[str, Any]] | None:
    mesh = ParallelMesh.build(LAYOUTS[layout][1])
    results = {task: train(folder, task, mesh, layout) for task, folder in folders.items()}
    return results if rank == 0 else {task: {"losses": r["losses"], "norms": r["norms"]} for task, r in results.items()}


@pytest.fixture(scope="module")
def folders(tiny_wan: Path, tiny_i2v: Path, tiny_ti2v: Path) -> dict[str, Path]:
    return dict(zip(TASKS, (tiny_wan, tiny_i2v, tiny_ti2v), strict=True))


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {task: train(folder, task, None, "") for task, folder in folders.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_rank(
    layout: str, folders: dict[str, Path], one_rank: dict[str, dict[str, Any]], run_ranks: Any
) -> None:
    """B050 for t2v, i2v and ti2v: cross-attention stays local, sequences that the ranks don't divide are padded."""
    results = run_ranks(train_rank, LAYOUTS[layout][0], folders, layout, preload=PRELOAD)
    for task, expected in one_rank.items():
        for result in results:
            assert result[task]["losses"] == pytest.approx(expected["losses"], rel=FP32_BLOCK), task
            assert result[task]["norms"] == pytest.approx(expected["norms"], rel=FP32_GRADIENT), task
        scales = gradient_scales(expected["gradients"])
        for name, gradient in expected["gradients"].items():
            bound = FP32_GRADIENT * (SHORT_TEXT if TEXT_WEIGHTS.search(name) else 1)
            assert_near(results[0][task]["gradients"][name], gradient, bound, (task, name), scales[name])


def predict_with_units(units: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and patch embedding's gradient of a tiny Wan2.1 image-to-video predictor in bf16 with these units."""
    _, model = model_pair(in_channels=36, image_dim=24, added_kv_proj_dim=64, num_layers=1)
    parallelize(
        model,
        mesh=ParallelMesh.build(MeshSizes(shard=2)),
        plan=FSDPPlan(apply_modules=units, param_dtype="bf16"),
    )
    noised, timestep, text = model_inputs(1, grid=(2, 2, 2), channels=36)
    image = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(1))
    out = model(noised, timestep, text, image)
    out.square().mean().backward()
    return out.detach(), full(model.patch_embedding.weight.grad)


def try_every_unit(rank: int, world_size: int) -> dict[str, str]:
    """Module → what goes wrong where it is a unit of its own."""
    _, model = model_pair(in_channels=36, image_dim=24, added_kv_proj_dim=64, num_layers=1)
    holders = [n for n, m in model.named_modules() if n and any(True for _ in m.parameters())]
    called = [n for n in holders if not isinstance(model.get_submodule(n), torch.nn.ModuleList)]
    leaves = tuple(n for n in called if not any(other.startswith(f"{n}.") for other in called))
    whole = predict_with_units(())
    wrong = {}
    for units in (*((name,) for name in called), leaves):
        try:
            (output, gradient), (whole_output, whole_gradient) = predict_with_units(units), whole
            assert torch.equal(output, whole_output), "another output"
            # A unit of its own takes its own copy of an input that three Linears share otherwise.
            assert_near(gradient, whole_gradient, BF16_GRADIENT)
        except Exception as error:  # noqa: BLE001 - every module is tried, whatever became of the others
            wrong["+".join(units)] = repr(error)
    return {"tried": str(len(called)), **wrong}


def test_every_module_of_the_predictor_may_be_a_unit_in_bf16(run_ranks: Any) -> None:
    """Each casts its own input, so the output is that of one unit for the whole predictor."""
    for result in run_ranks(try_every_unit, 2, preload=PRELOAD):
        assert int(result.pop("tried")) > 30
        assert result == {}
