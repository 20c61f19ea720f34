"""Optimizers against references that others wrote; on any layout; resumed; with steps left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_close import FP32_OP, FP32_TRACE, assert_near
from optimizer_models import KINDS, Net, build, eager, run, set_gradients, snapshot, training
from rank_training import read_checkpoint, trace, train_rank
from torch import Tensor, nn

from mm_trainer.metrics.profiling import held_bytes
from mm_trainer.optim import low_bit
from mm_trainer.optim.low_bit import random_bits, round_stochastically
from mm_trainer.optim.optimizers import build_optimizers

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao isn't installed")
EVERY = [pytest.param(kind, marks=needs_torchao) if kind == "adamw_8bit" else kind for kind in KINDS]
FUSED = ("adamw", "muon")
"""Those that use torch's fused AdamW, muon for what isn't a matrix."""


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], *, except_adamw: bool = False) -> None:
    """To the bit; ``except_adamw``: what torch's fused AdamW updates is as close as its kernel on another length is."""
    fused = {name.rsplit(".", 1)[0].removeprefix("net.") for name in expected if name.endswith("exp_avg")}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        parts = name.removeprefix("net.")
        if except_adamw and (parts in fused or parts.rsplit(".", 1)[0] in fused):
            assert_near(found[name], tensor, FP32_OP, name)
        else:
            assert torch.equal(found[name], tensor), name


# --- the arithmetic -----------------------------------------------------------------------------------------------


def reference(kind: str, net: nn.Module) -> list[torch.optim.Optimizer]:
    adamw: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    if kind == "adamw":
        return [torch.optim.AdamW(net.parameters(), **adamw, foreach=False)]
    if kind == "adamw_8bit":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(net.parameters(), **adamw)]
    matrices = [block.weight for block in net.blocks]
    others = [p for p in net.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, **adamw, fused=True),
    ]


@pytest.mark.numeric
@pytest.mark.parametrize("kind", [k for k in EVERY if k != "adamw_sr"])
def test_five_steps_equal_the_reference(kind: str) -> None:
    net, optimizer = build(kind)
    run(net, optimizer, range(5))
    theirs = Net()
    references = reference(kind, theirs)
    for step in range(5):
        set_gradients(theirs, step)
        for other in references:
            for group in other.param_groups:
                lr = 1e-2 / (step + 1)
                group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
            with eager():
                other.step()
    for (name, found), expected in zip(net.named_parameters(), theirs.parameters(), strict=True):
        rtol, atol = (0, 0) if kind == "muon" else (1e-6, 1e-7)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    if kind == "adamw_8bit":
        state = references[0].state[theirs.blocks[0].weight]
        own = optimizer.state()
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own[f"net.blocks.0.weight.{moment}_codes"], state[moment].codes)
            assert torch.equal(own[f"net.blocks.0.weight.{moment}_scale"].flatten(), state[moment].scale)


@pytest.mark.numeric
def test_stochastic_rounding_gives_a_neighbour_and_is_right_on_average() -> None:
    values = torch.tensor([1.0, 1 + 2**-9, -(1 + 3 * 2**-10), 3e-20, 7.0e20]).repeat_interleave(20_000)
    bits = random_bits(0, len(values), 123, torch.tensor(7.0))
    rounded = round_stochastically(values, bits).float().view(5, -1)
    for row, value in zip(rounded, values.view(5, -1)[:, 0], strict=True):
        assert len(row.unique()) <= 2
        gap = 2.0 ** (torch.frexp(value).exponent.item() - 8)
        assert (row - value).abs().max() < gap
        assert abs(row.double().mean() - value.double()) < 0.02 * gap, "the mean of 20,000 is within 0.5 % to 1 sigma"
    assert torch.equal(rounded[0], torch.ones_like(rounded[0])), "what bf16 holds isn't touched"
    assert round_stochastically(torch.tensor([float("inf")]), torch.tensor([65535], dtype=torch.int32)).isinf()


def test_random_bits_differ_by_position_step_and_key_and_are_uniform() -> None:
    draws = {
        (key, step): random_bits(0, 40_000, key, torch.tensor(float(step))) for key in (1, 2) for step in (1, 2, 3)
    }
    for bits in draws.values():
        assert bits.min() >= 0 and bits.max() < 2**16
        counts = torch.histc(bits.float(), bins=16, min=0, max=2**16)
        assert ((counts - 2500) ** 2 / 2500).sum() < 50, "chi-square, 15 degrees of freedom"
    stacked = torch.stack(list(draws.values())).double()
    correlation = torch.corrcoef(stacked) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.03, "5 sigma are 0.025"
    assert torch.equal(random_bits(100, 50, 1, torch.tensor(1.0)), draws[1, 1][100:150])


def test_random_bits_are_the_hash_in_unbounded_integers() -> None:
    """Past 2^31 and 2^32 elements too, where int32 wraps around."""

    def mix(value: int) -> int:
        value = ((value ^ (value >> 16)) * 0x85EBCA6B) % 2**32
        value = ((value ^ (value >> 13)) * 0xC2B2AE35) % 2**32
        return value ^ (value >> 16)

    for first in (2**31 - 5, 2**32 - 5, 2**33 - 5):
        expected = [mix(((first + i) % 2**32) ^ mix(mix(37) ^ 0xFEDCBA98)) % 2**16 for i in range(10)]
        assert random_bits(first, 10, 0xFEDCBA98, torch.tensor(37.0)).tolist() == expected


def moved_by_small_updates(kind: str) -> float:
    """By how much 20 steps of 1e-4 lower bf16 weights of 1 on average."""
    net = Net(torch.bfloat16)
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    allowed = {"half_precision_weights": True} if kind == "adamw" else {}
    optimizer = build_optimizers({"net": net}, training(kind, weight_decay=0.0, optimizer_options=allowed))["net"]
    for _ in range(20):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-4, torch.tensor(0.0))
    return 1 - torch.cat([p.detach().float().flatten() for p in net.parameters()]).mean().item()


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["adamw_sr", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_small_updates_of_bf16_weights_count_on_average(kind: str) -> None:
    """A step is a fortieth of what bf16 resolves below 1; rounding to nearest loses every one."""
    assert moved_by_small_updates("adamw") == 0
    assert moved_by_small_updates(kind) == pytest.approx(20 * 1e-4, rel=0.05)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", EVERY)
def test_groups_scale_learning_rate_and_leave_decay_out(kind: str) -> None:
    """With no gradient only weight decay moves a weight: by lr × scale × decay, or not at all."""
    net, optimizer = build(
        kind, no_decay_params=["bias"], lr_scaling_plan=[{"apply_modules": ["net.blocks.0"], "scale": 50.0}]
    )
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-2, torch.tensor(0.0))
    assert all(parameter.grad is None for parameter in net.parameters())
    for name, parameter in net.named_parameters():
        factor = 1 - (0.0 if "bias" in name else 0.1) * 1e-2 * (50 if name.startswith("blocks.0") else 1)
        tolerance = {"rtol": 2**-7, "atol": 0} if kind == "adamw_sr" else {"rtol": 1e-6, "atol": 0}
        torch.testing.assert_close(parameter.detach(), before[name] * factor, **tolerance)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", [pytest.param("adamw_8bit", marks=needs_torchao), "adamw_sr"])
def test_the_size_of_the_pieces_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for piece in (low_bit._PIECE, 512):
        monkeypatch.setattr(low_bit, "_PIECE", piece)
        net, optimizer = build(kind)
        run(net, optimizer, range(3))
        found.append(snapshot(net, optimizer))
    assert_equal(found[1], found[0])


def test_muon_takes_the_matrices_of_blocks_or_those_that_are_named() -> None:
    def matrices(**options: Any) -> set[str]:
        _, optimizer = build("muon", **options)
        return {name.rsplit(".", 1)[0] for name in state_names(optimizer) if name.endswith("momentum_buffer")}

    assert matrices() == {f"net.blocks.{i}.weight" for i in range(3)}
    assert matrices(muon_params=["table.weight", "net.blocks.1"]) == {"net.table.weight", "net.blocks.1.weight"}


def state_names(optimizer: Any) -> list[str]:
    for parameter in optimizer.names:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0, torch.tensor(0.0))
    return list(optimizer.state())


@pytest.mark.parametrize(
    ("kind", "bytes_per_weight"),
    [("adamw", 8), pytest.param("adamw_8bit", 2 + 2 * 4 / 256, marks=needs_torchao), ("adamw_sr", 8), ("muon", 4)],
)
def test_state_takes_the_bytes_that_the_readme_says(kind: str, bytes_per_weight: float) -> None:
    net, optimizer = build(kind)
    net.requires_grad_(False)
    net.blocks[0].weight.requires_grad_(True)
    optimizer = build_optimizers({"net": net}, training(kind))["net"]
    state_names(optimizer)
    weights = net.blocks[0].weight.numel()
    counter = 0 if kind == "muon" else 4
    assert held_bytes({"net": net}, {"net": optimizer})["net"]["optimizer"] == weights * bytes_per_weight + counter


# --- a step that is left out --------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("kind", EVERY)
def test_a_bad_step_leaves_weights_and_state_alone(kind: str) -> None:
    """B111: also as the first step; what follows is as if it had not been."""
    net, optimizer = build(kind)
    run(net, optimizer, range(1), bad=frozenset([0]))
    assert_equal({name: p.detach() for name, p in net.named_parameters()}, dict(build(kind)[0].named_parameters()))
    assert not any(tensor.any() for tensor in optimizer.state().values())
    run(net, optimizer, range(1, 3))
    before = snapshot(net, optimizer)
    run(net, optimizer, range(3, 4), bad=frozenset([3]))
    assert_equal(snapshot(net, optimizer), before)
    run(net, optimizer, range(4, 6))
    other, undisturbed = build(kind)
    run(other, undisturbed, range(1, 3))
    run(other, undisturbed, range(4, 6))
    assert_equal(snapshot(net, optimizer), snapshot(other, undisturbed))


# --- on ranks -----------------------------------------------------------------------------------------------------


def imports(kind: str) -> tuple[str, ...]:
    """What the ranks needn't import each for itself."""
    return ("torchao.optim.quant_utils",) if kind == "adamw_8bit" else ()


def build_on_ranks(kind: str, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    net = Net(torch.bfloat16 if kind == "adamw_sr" else torch.float32)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, build_optimizers({"net": net}, training(kind))["net"]


def five_steps(rank: int, world_size: int, kind: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    net, optimizer = build_on_ranks(kind, sizes)
    run(net, optimizer, range(5), bad=frozenset([2]))
    return snapshot(net, optimizer)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["two", "two-by-two"])
def test_any_layout_gives_the_bits_of_one_process(run_ranks, kind: str, sizes: tuple[int, ...]) -> None:
    """Equal gradients, equal weights and state; of replicas too."""
    net, optimizer = build(kind)
    run(net, optimizer, range(5), bad=frozenset([2]))
    expected = snapshot(net, optimizer)
    for found in run_ranks(five_steps, torch.Size(sizes).numel(), kind, sizes, preload=imports(kind)):
        assert_equal(found, expected, except_adamw=kind in FUSED)


def save_after_three(rank: int, world_size: int, kind: str, folder: str) -> None:
    from mm_checkpoint import CheckpointManager

    net, optimizer = build_on_ranks(kind, (world_size,))
    run(net, optimizer, range(3))
    with CheckpointManager(folder) as manager:
        manager.save(3, {"model": net.state_dict(), "optimizer": optimizer.state()})


def resume_for_two(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Tensor]:
    from mm_checkpoint import CheckpointManager

    net, optimizer = build_on_ranks(kind, (world_size,))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(9.0)
    names = [name.removeprefix("optimizer.") for name in read_checkpoint(Path(folder) / "iter_0000003")]
    with CheckpointManager(folder) as manager:
        stored = [name for name in names if not name.startswith("model.")]
        manager.load(
            Path(folder) / "iter_0000003",
            {"model": net.state_dict(), "optimizer": optimizer.allocate_state(stored)},
        )
    run(net, optimizer, range(3, 5))
    return snapshot(net, optimizer)


@pytest.mark.parametrize("kind", EVERY)
def test_three_steps_and_two_resumed_on_other_ranks_are_five(run_ranks, kind: str, tmp_path: Path) -> None:
    """Saved by two ranks; resumed by one and by three, some of which hold no row."""
    net, optimizer = build(kind)
    run(net, optimizer, range(5))
    expected = snapshot(net, optimizer)
    run_ranks(save_after_three, 2, kind, str(tmp_path / "run"), preload=imports(kind))
    for ranks in (1, 3):
        for found in run_ranks(resume_for_two, ranks, kind, str(tmp_path / "run"), preload=imports(kind)):
            assert_equal(found, expected, except_adamw=kind in FUSED)


RUN = """
parallel:
  fsdp_plan: {{apply_modules: ["blocks.{{*}}"], param_dtype: fp32}}
model: {{model_id: wide_regressor}}
data:
  dataset_param: {{dataset_type: single_rows, poison: 5}}
  dataloader_param: {{num_workers: 0}}
training:
  plugin: [trainer_plugin_models, optimizer_models]
  save: {save}
  save_async: false
  micro_batch_size: 2
  train_iters: 5
  save_interval: 3
  nan_policy: skip
  lr: 0.002
"""


@pytest.mark.parametrize("kind", [k for k in EVERY if k != "adamw"])
def test_a_run_that_is_resumed_is_the_same_run(run_ranks, kind: str, tmp_path: Path) -> None:
    """Through the engine, with a bad step before the save: bit for bit on the same layout."""
    config = tmp_path / "config.yaml"
    config.write_text(RUN.format(save=tmp_path / "run"), encoding="utf-8")
    options = [f"training.optimizer={kind}"]
    if kind == "adamw_sr":
        options += ["model.dtype=bf16", "parallel.fsdp_plan.param_dtype=bf16"]
    records = run_ranks(train_rank, 2, {}, options, str(config), preload=imports(kind))[0]
    assert records[-1]["skipped_steps"] == 1
    rest = [*options, f"training.load={tmp_path / 'run' / 'iter_0000003'}", f"training.save={tmp_path / 'rest'}"]
    run_ranks(train_rank, 2, {}, rest, str(config), preload=imports(kind))
    expected = read_checkpoint(tmp_path / "run" / "iter_0000005")
    found = read_checkpoint(tmp_path / "rest" / "iter_0000005")
    assert any(name.startswith("optimizer.blocks.0.weight.") for name in expected)
    assert_equal(found, expected)


@pytest.mark.numeric
def test_a_run_with_muon_is_the_same_on_one_rank_and_on_two(run_ranks, tmp_path: Path) -> None:
    """Gradients differ by rounding here, which orthogonalising in bf16 enlarges; the loss is fp32's all the same."""
    config = tmp_path / "config.yaml"
    config.write_text(RUN.format(save=tmp_path / "run"), encoding="utf-8")
    same = ["training.global_batch_size=4", "training.gradient_accumulation_steps=auto", "training.train_iters=8"]
    options = [*same, "training.optimizer=muon", "training.lr=0.0005", "data.dataset_param.poison=-1"]
    traces = [
        trace(run_ranks(train_rank, ranks, {}, [*options, f"training.save={tmp_path / str(ranks)}"], str(config))[0])
        for ranks in (1, 2)
    ]
    assert traces[0][-1] < 0.9 * traces[0][0]
    torch.testing.assert_close(torch.tensor(traces[1]), torch.tensor(traces[0]), rtol=FP32_TRACE, atol=0)
