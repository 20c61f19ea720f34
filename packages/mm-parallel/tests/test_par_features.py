"""Recompute, activation offload and compile: alone, together, and under everything that disturbs them."""

from __future__ import annotations

import gc
import resource

import pytest
import torch
import torch.nn.functional as F
from numbers_close import FP32_OP, assert_gradients_near, assert_near
from par_models import Pipeline, batch, whole
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mm_parallel import (
    ActivationOffloadPlan,
    CompilePlan,
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    PatternError,
    RecomputePlan,
    apply_features,
    check_features,
    parallelize,
)
from mm_parallel.activations.activation_offload import ActivationOffload, _HostCopy

BLOCKS = ("predictor.blocks.{*}",)


def build(**options):
    torch.manual_seed(0)
    return Pipeline(**options)


def features(kind, **recompute):
    return FeaturesConfig(
        recompute=kind in ("recompute", "both"),
        recompute_plan=RecomputePlan(**({"apply_modules": BLOCKS} | recompute)),
        enable_activation_offload=kind in ("offload", "both"),
        activation_offload_plan=ActivationOffloadPlan(apply_modules=BLOCKS, min_bytes=0),
    )


def gradients(model):
    return {n: whole(p.grad).clone() for n, p in model.predictor.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(a[n].equal(b[n]) for n in a)


def calls_of_blocks(model):
    """Counts how often each block's own forward runs; call before the features are applied."""
    counts = [0] * len(model.predictor.blocks)
    for index, block in enumerate(model.predictor.blocks):

        def counted(*args, _forward=block.forward, _index=index, **kwargs):
            counts[_index] += 1
            return _forward(*args, **kwargs)

        block.forward = counted
    return counts


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (features("recompute"), [2, 2, 2, 2]),
        (features("recompute", policy="every_n", n=2), [2, 1, 2, 1]),
        (features("recompute", policy="every_n", n=3), [2, 1, 1, 2]),
        (features("recompute", policy="ops"), [2, 2, 2, 2]),
        (features("offload"), [1, 1, 1, 1]),
        (features("both"), [2, 2, 2, 2]),
    ],
    ids=["full", "every 2nd", "every 3rd", "ops", "offload", "both"],
)
def test_gradients_do_not_change_by_a_bit(config, calls):
    plain = build(layers=4)
    plain.loss(*batch(0)).backward()
    model = build(layers=4)
    counts = calls_of_blocks(model)
    keys = list(model.state_dict())
    apply_features(model, config)
    model.loss(*batch(0)).backward()
    assert counts == calls
    assert same(gradients(model), gradients(plain))
    assert list(model.state_dict()) == keys


def saved_bytes(model, config):
    """Bytes that the blocks' graphs keep, each storage once, parameters left out."""
    apply_features(model, config)
    storages = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model.loss(*batch(0, tokens=64))
    return sum(storages.values()), loss


def test_recompute_keeps_less_and_selective_recompute_something_between():
    by_kind = {
        "nothing": saved_bytes(build(), FeaturesConfig())[0],
        "full": saved_bytes(build(), features("recompute"))[0],
    }
    assert by_kind["full"] < 0.5 * by_kind["nothing"]


def test_selective_recompute_runs_kept_operators_once():
    """Matrix products are kept, so recomputing a block issues none of them again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
                self.count += 1
            return func(*args, **(kwargs or {}))

    counts = {}
    for name, config in (
        ("plain", FeaturesConfig()),
        ("ops", features("recompute", policy="ops")),
        ("full", features("recompute")),
    ):
        model = build()
        apply_features(model, config)
        with Products() as products:
            model.loss(*batch(0)).backward()
        counts[name] = products.count
    assert counts["ops"] == counts["plain"] < counts["full"]


def test_keep_ops_are_named():
    with pytest.raises(ValueError, match=r"keep_ops: torch.ops has no 'aten.mmm'; write namespace.op"):
        check_features(build(), features("recompute", policy="ops", keep_ops=("aten.mmm",)))
    assert check_features(build(), features("recompute", policy="ops", keep_ops=("torch.ops.aten.mm",)))


def test_dead_and_nested_patterns_are_refused():
    """B040: the same message for recompute and offload; one module inside another is refused."""
    with pytest.raises(PatternError, match=r"features.recompute_plan.apply_modules: .*did you mean predictor.blocks"):
        check_features(build(), features("recompute", apply_modules=("predictor.block.{*}",)))
    with pytest.raises(ValueError, match=r"names both 'predictor.blocks.0' and 'predictor.blocks.0.ffn' inside it"):
        apply_features(build(), features("recompute", apply_modules=("predictor.blocks.0", "predictor.blocks.0.ffn")))
    model = build()
    apply_features(model, features("recompute"))
    with pytest.raises(ValueError, match="already has a layer RECOMPUTE"):
        apply_features(model, features("recompute"))


@pytest.mark.parametrize("kind", ["recompute", "offload", "both"])
def test_a_forward_without_gradients_in_between_changes_nothing(kind):
    """B044: train step, validation forward in train mode, train step: as without the middle part."""
    outcomes = []
    for disturbed in (False, True):
        model = build()
        apply_features(model, features(kind))
        optimizer = torch.optim.SGD(model.predictor.parameters(), lr=0.1)
        for step in range(3):
            loss = model.loss(*batch(step))
            if disturbed:
                with torch.no_grad():
                    model.loss(*batch(9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(model.loss(*batch(5)).item())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", ["recompute", "offload", "both"])
def test_two_forwards_before_one_backward(kind):
    """B042: conditional and unconditional prediction, summed; equal to the run without the feature."""
    found = []
    for config in (FeaturesConfig(), features(kind)):
        model = build()
        apply_features(model, config)
        (model.loss(*batch(0)) + model.loss(*batch(1))).backward()
        found.append(gradients(model))
    assert same(*found)


class Views(nn.Module):
    """Saves views, transposes, slices and the same tensor twice; writes to one that was saved before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        out = scores @ v + (scores * scores).transpose(-1, -2) @ v
        first = out[:, :1] * self.scale
        y = out * 2.0
        z = y.sin()  # saves y
        y = y.detach().clone()
        y.mul_(3.0)
        return z * self.scale + first.exp() + y * self.scale


@pytest.mark.parametrize("min_bytes", [0, 200, 10**9])
def test_offload_of_tensors_that_share_storage(min_bytes):
    """Views and transposes of one storage come back from one copy, with their own shapes and strides."""
    x = torch.randn(2, 5, 8)
    found = []
    for is_on in (False, True):
        model = Views()
        if is_on:
            plan = ActivationOffloadPlan(min_bytes=min_bytes)
            model.forward = ActivationOffload(plan).around(model.forward)
        inputs = x.clone().requires_grad_()
        model(inputs).square().sum().backward()
        found.append([inputs.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert a.equal(b)


def test_offload_takes_activations_once_and_never_parameters():
    """Neither parameters nor views of them are copied; a tensor that two blocks save is copied once."""
    copies = []
    original = _HostCopy.__init__

    def counted(self, tensor, start, stop):
        copies.append((tensor.untyped_storage().data_ptr(), stop - start))
        original(self, tensor, start, stop)

    _HostCopy.__init__ = counted
    try:
        model = build()
        apply_features(model, features("offload"))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        loss = model.loss(*batch(0))
    finally:
        _HostCopy.__init__ = original
    assert copies
    assert not parameters & {pointer for pointer, _ in copies}
    loss.backward()


@pytest.mark.numeric
def test_offload_of_an_in_place_change_after_the_save():
    """A saved tensor that is written to later comes back as it was; autograd alone would refuse."""
    offload = ActivationOffload(ActivationOffloadPlan(min_bytes=0))

    def forward(x):
        y = x * 2
        z = y.sin()
        y.add_(1.0)
        return z, y.cos()

    x = torch.randn(8, requires_grad=True)
    a, b = offload.around(forward)(x)
    (a + b).sum().backward()
    expected = 2 * (2 * x).cos() - 2 * (2 * x + 1).sin()
    assert_near(x.grad, expected.detach(), FP32_OP)


def test_offload_frees_what_it_copied():
    """After the forward nothing but the host copy is left of an activation, and after the backward not even that."""
    offload = ActivationOffload(ActivationOffloadPlan(min_bytes=0))
    seen = []

    def forward(x):
        y = x * 2
        seen.append(StorageWeakRef(y.untyped_storage()))
        return y.sin()

    x = torch.randn(8, requires_grad=True)
    out = offload.around(forward)(x)
    assert seen[0].expired()
    assert len(offload._copies) == 1
    out.sum().backward()
    assert len(offload._copies) == 0


@pytest.mark.numeric
def test_offload_survives_retained_graphs_and_dropped_ones():
    model = build()
    apply_features(model, features("offload"))
    loss = model.loss(*batch(0))
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_gradients_near(gradients(model), {name: 2 * gradient for name, gradient in once.items()}, FP32_OP)
    model.zero_grad()
    dropped = model.loss(*batch(1))
    del dropped
    model.loss(*batch(0)).backward()
    assert same(gradients(model), once)


def resident_mb():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def test_offload_gives_its_memory_back():
    """B109: 50 steps of varying lengths: resident memory stays flat, and losses are those without offload."""
    losses = []
    for kind in ("none", "offload"):
        model = build(layers=1)
        apply_features(model, features(kind))
        trace = []
        for step in range(50):
            loss = model.loss(*batch(step, tokens=20 + 9 * (step * 7 % 10)))
            loss.backward()
            model.zero_grad()
            trace.append(loss.item())
            if step == 20:
                before = resident_mb()
        losses.append(trace)
    assert losses[0] == losses[1]
    assert resident_mb() - before < 10
    assert not any(type(thing) is _HostCopy for thing in gc.get_objects())


def under_fsdp(rank, world, kind, ring):
    sizes = MeshSizes(shard=world, ring=world if ring else 1)
    mesh = ParallelMesh.build(sizes)
    found = []
    for config in (FeaturesConfig(), features(kind)):
        model = build()
        model.predictor.set_context_parallel(mesh.context_parallel())
        keys = set(model.predictor.state_dict())
        apply_features(model, config)
        subs = {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}
        plan = FSDPPlan(apply_modules=BLOCKS, ignored_modules=("ae",), param_dtype="bf16")
        parallelize(model, mesh=mesh, plan=plan, sub_models=subs)
        with torch.no_grad():
            model.loss(*batch(7, tokens=75))
        loss = model.loss(*batch(mesh.data_rank, tokens=75)) + model.loss(*batch(mesh.data_rank + 4, tokens=75))
        loss.backward()
        found.append(gradients(model))
        assert set(model.predictor.state_dict()) == keys
    return same(*found)


@pytest.mark.numeric
@pytest.mark.parametrize(("kind", "ring"), [("recompute", False), ("both", True), ("offload", False)])
def test_features_under_fsdp_in_bf16_and_with_context_parallelism(run_ranks, kind, ring):
    """B012, B028, B042, B058: bf16 with fp32 position tables, 2 ranks, two forwards before the backward, 75 tokens on
    a ring: gradients equal those without the feature bit for bit, and so do the keys of the state dict.
    """
    assert run_ranks(under_fsdp, 2, kind, ring) == [True, True]


def test_recompute_reaches_parameters_even_if_no_input_needs_a_gradient():
    """The reentrant form would drop the gradients of a block whose inputs need none."""
    model = nn.Sequential(nn.Linear(2, 2))
    apply_features(model, FeaturesConfig(recompute=True, recompute_plan=RecomputePlan(apply_modules=("0",))))
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None


def compiled_under_fsdp(rank, world):
    found = []
    for compile_plan in (CompilePlan(), CompilePlan(apply_modules=BLOCKS, backend="aot_eager")):
        config = FeaturesConfig(
            recompute=True, recompute_plan=RecomputePlan(apply_modules=BLOCKS), compile_plan=compile_plan
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build()
        keys = set(model.state_dict())
        apply_features(model, config)
        assert set(model.state_dict()) == keys
        plan = FSDPPlan(apply_modules=("blocks.{*}",), param_dtype=None)
        parallelize(model.predictor, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=plan)
        model.loss(*batch(rank)).backward()
        found.append((gradients(model), torch._dynamo.utils.counters["stats"]["calls_captured"]))
    return found


@pytest.mark.numeric
@pytest.mark.slow
def test_compiled_blocks_under_recompute_and_fsdp(run_ranks):
    """B012: something is compiled, gradients agree, no `_orig_mod` in any key."""
    for (expected, none), (found, captured) in run_ranks(compiled_under_fsdp, 2, timeout=300):
        assert none == 0
        assert captured > 0
        assert_gradients_near(found, expected)


def test_apply_features_reports_what_it_did():
    model = build()
    assert apply_features(model, FeaturesConfig()) == {}
    done = apply_features(model, features("both"))
    names = ["predictor.blocks.0", "predictor.blocks.1"]
    assert done == {"recompute": {BLOCKS[0]: names}, "offload": {BLOCKS[0]: names}}
    loss = F.mse_loss(model.predictor(*(batch(0)[i] for i in (0, 1)), torch.zeros(1, 5, 8)), batch(0)[3])
    assert loss.isfinite()


@pytest.mark.parametrize("kind", ["recompute", "offload"])
def test_a_plan_needs_no_switch_and_is_checked_though_switched_off(kind):
    switch = {"recompute": "recompute", "offload": "enable_activation_offload"}[kind]
    name = {"recompute": "recompute_plan", "offload": "activation_offload_plan"}[kind]
    plan = {"recompute": RecomputePlan, "offload": ActivationOffloadPlan}[kind]
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    on = FeaturesConfig(**{name: plan(apply_modules=("0",))})
    assert check_features(model, on) == {kind: {"0": ["0"]}}
    off = FeaturesConfig(**{name: plan(apply_modules=("0",)), switch: False})
    assert check_features(model, off) == {}
    with pytest.raises(PatternError, match="'x' matches no module"):
        check_features(model, FeaturesConfig(**{name: plan(apply_modules=("x",)), switch: False}))
