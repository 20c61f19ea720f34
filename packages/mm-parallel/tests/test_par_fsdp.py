"""What `parallelize` leaves behind on several ranks: layouts, memory, dtypes, prefetch, and who may change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numbers_close import FP32_BLOCK, assert_gradients_near, assert_near
from par_models import Denoiser, Encoder, Pipeline, batch, whole
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from mm_parallel import (
    ContextParallel,
    FeaturesConfig,
    FSDPPlan,
    MeshSizes,
    ParallelMesh,
    PlanError,
    RecomputePlan,
    SubPlan,
    apply_features,
    clip_grad_norm,
    count_communication,
    parallelize,
    prefetch,
    process_group_backend,
    reset_frozen,
    set_gradient_sync,
)

PATTERNS = ("predictor.blocks.{*}",)


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Pipeline(**options)


def sharded(sizes, plan, model=None, features=None):
    model = model or build()
    mesh = ParallelMesh.build(sizes)
    if features:
        apply_features(model, features)
    subs = {"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}
    return model, mesh, parallelize(model, mesh=mesh, plan=plan, sub_models=subs)


def plan(**options):
    options = {"apply_modules": PATTERNS, "ignored_modules": ("ae",), "param_dtype": None} | options
    return FSDPPlan(**options)


def gradients(model):
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def reference_gradients(keys):
    model = build()
    model.loss(*batch(*keys)).backward()
    return gradients(model.predictor)


def local_bytes(module):
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in module.parameters())


def frozen_roots(rank, world, reshard, sub_plans):
    model, _, _ = sharded(MeshSizes(shard=world), plan(reshard_after_forward=reshard, sub_plans=sub_plans))
    before = local_bytes(model.text_encoder)
    with torch.no_grad():
        out = model.text_encoder(batch(0)[2])
    reset_frozen(model.text_encoder)
    after = local_bytes(model.text_encoder)
    alone = build()
    return out.equal(alone.text_encoder(batch(0)[2])), before, after, local_bytes(alone.text_encoder)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_frozen_root_is_resharded_after_its_forward(run_ranks, reshard):
    """B032: after a no-grad forward each rank holds about 1/N of the bytes, whatever the plan's reshard says."""
    for same_bits, before, after, total in run_ranks(frozen_roots, 2, reshard, {}):
        assert same_bits
        assert before == after
        assert abs(after - total / 2) <= 32  # 29 rows on 2 ranks


@pytest.mark.numeric
def test_a_frozen_sub_model_has_the_same_bits_under_a_plan_of_its_own(run_ranks):
    """Shard size 2 of 4: half of the bytes on each rank, outputs as under the global plan."""
    for same_bits, before, after, total in run_ranks(frozen_roots, 4, True, {"text_encoder": SubPlan(shard_size=2)}):
        assert same_bits
        assert before == after
        assert abs(after - total / 2) <= 32  # 29 rows on 2 ranks


def ignored_and_disabled(rank, world):
    model = build()
    model.ae.double()
    model, _, report = sharded(
        MeshSizes(shard=world), plan(param_dtype="bf16", sub_plans={"text_encoder": SubPlan(enabled=False)}), model
    )
    latents = model.ae(torch.ones(1, 6, dtype=torch.float64))
    plain = [type(p) for m in (model.ae, model.text_encoder) for p in m.parameters()]
    return latents.dtype, set(plain), {p.device.type for p in model.ae.parameters()}, report.plain


def test_ignored_and_disabled_modules_stay_plain(run_ranks):
    """B033: no DTensor, own dtype, one device, outside the mixed-precision policy; and it encodes."""
    for dtype, types, devices, plain in run_ranks(ignored_and_disabled, 2):
        assert dtype == torch.float64
        assert types == {nn.Parameter}
        assert devices == {"cpu"}
        assert set(plain) == {"ae", "text_encoder"}


def one_step(rank, world, sizes, options, lr=0.1):
    model, mesh, _ = sharded(sizes, plan(**options))
    loss = model.loss(*batch(mesh.data_rank))
    loss.backward()
    found = gradients(model.predictor)
    norm = clip_grad_norm(model.predictor.parameters(), None)
    torch.optim.SGD(model.predictor.parameters(), lr=lr).step()
    local = [p.to_local().clone() if isinstance(p, DTensor) else p.clone() for p in model.predictor.parameters()]
    return found, norm, [t.detach() for t in local]


SETTINGS = (
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2},
    {"cpu_offload": True},
    {"sub_plans": {"predictor": SubPlan(shard_size=2, trainable=True, cpu_offload=True)}},
    {"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0},
    {"num_to_forward_prefetch": 7, "num_to_backward_prefetch": 2},
)


def one_step_each(rank, world):
    return [one_step(rank, world, MeshSizes(shard=world), options)[0] for options in SETTINGS]


@pytest.mark.numeric
def test_settings_that_change_no_number(run_ranks):
    """B041 and others: reshard, offload and prefetch settings leave loss and gradients alone."""
    expected = reference_gradients(range(4))
    for gradients_of_each in run_ranks(one_step_each, 4, timeout=240):
        for options, found in zip(SETTINGS, gradients_of_each, strict=True):
            print(options)
            assert_gradients_near(found, expected)


@pytest.mark.numeric
def test_shard_size_one_on_several_ranks_still_synchronises(run_ranks):
    """B038: replicas without shards train one model: identical bits, and the mean gradient's update."""
    model = build()
    model.loss(*batch(0, 1)).backward()
    torch.optim.SGD(model.predictor.parameters(), lr=0.1).step()
    first, second = run_ranks(one_step, 2, MeshSizes(replicate=2, shard=1), {})
    for a, b, parameter in zip(first[2], second[2], model.predictor.parameters(), strict=True):
        assert a.equal(b)
        assert_near(a, parameter.detach(), FP32_BLOCK)


def hsdp_and_sub_plan(rank, world):
    sub_plans = {"predictor": SubPlan(shard_size=2, trainable=True)}
    return [
        one_step(rank, world, MeshSizes(2, 2), {})[1:],
        one_step(rank, world, MeshSizes(shard=4), {"sub_plans": sub_plans})[1:],
    ]


@pytest.mark.numeric
def test_replicas_keep_identical_bits_and_norms_count_every_element_once(run_ranks):
    """B035: HSDP 2 × 2 and a trainable sub-plan: the norm is equal on every rank and that of one process."""
    model = build()
    model.loss(*batch(0, 1, 2, 3)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.predictor.parameters(), 1e9)
    ranks = run_ranks(hsdp_and_sub_plan, 4)
    for layout in range(2):
        norms, parameters = zip(*(found[layout] for found in ranks), strict=True)
        for a, b in zip(parameters[0] + parameters[1], parameters[2] + parameters[3], strict=True):
            assert a.equal(b)  # rank r and r + 2 hold the same shard
        assert len(set(map(float, norms))) == 1
        assert type(norms[0]) is torch.Tensor
        assert_near(norms[0], norm, FP32_BLOCK)


class Table(nn.Module):
    """A trained table that is tied to the output; 7 rows divide by nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(self.table(ids)).clone()  # clone: FSDP2 warns of a unit that returns a view


def tied_training(rank, world):
    model = Table()
    if world > 1:
        parallelize(model, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=FSDPPlan(param_dtype=None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        ids = (torch.arange(12) * (step + 2)) % 7
        mine = ids[rank * 12 // world : (rank + 1) * 12 // world]
        F.cross_entropy(model(mine), (mine + 1) % 7).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.table.weight.detach()), model.out.weight is model.table.weight


@pytest.mark.numeric
@pytest.mark.parametrize("world", [2, 3])
def test_a_tied_table_whose_rows_do_not_divide(run_ranks, world):
    """B031: 7 rows on 2 and 3 ranks, 3 SGD steps: every row as in one process, and still tied."""
    expected, _ = tied_training(0, 1)
    for table, tied in run_ranks(tied_training, world):
        assert_near(table, expected, FP32_BLOCK)
        assert tied


def tied_units(rank, world):
    torch.manual_seed(0)
    encoder = Encoder()
    patterns = ("shared", "out", "blocks.{*}")
    report = parallelize(
        encoder, mesh=ParallelMesh.build(MeshSizes(shard=world)), plan=FSDPPlan(patterns, param_dtype=None)
    )
    ids = batch(rank)[2]
    encoder(ids).square().mean().backward()
    return gradients(encoder), [unit.name for unit in report.units]


@pytest.mark.numeric
def test_tied_modules_named_as_units_of_their_own_still_run(run_ranks):
    """B030: on recent torch a tied tensor in two FSDP groups raises; here the tie moves to the common root."""
    torch.manual_seed(0)
    encoder = Encoder()
    encoder(batch(0, 1)[2]).square().mean().backward()
    for found, names in run_ranks(tied_units, 2):
        assert names == ["", "blocks.0", "blocks.1"]
        assert_gradients_near(found, gradients(encoder))


def partly_frozen(rank, world):
    model = build()
    model.predictor.blocks[0].requires_grad_(False)
    for name, parameter in model.predictor.blocks[1].named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    before = {n: p.detach().clone() for n, p in model.predictor.named_parameters()}
    keys = set(model.predictor.state_dict())
    if world > 1:
        features = FeaturesConfig(recompute=True, recompute_plan=RecomputePlan(apply_modules=PATTERNS))
        model, _, _ = sharded(MeshSizes(shard=world), plan(), model, features)
    model.loss(*batch(*((rank,) if world > 1 else (0, 1)))).backward()
    trained = [p for p in model.predictor.parameters() if p.requires_grad]
    found = gradients(model.predictor)
    torch.optim.SGD(trained, lr=0.1).step()
    after = {n: whole(p.detach()) for n, p in model.predictor.named_parameters()}
    frozen_bits = all(after[n].equal(before[n]) for n, p in model.predictor.named_parameters() if not p.requires_grad)
    moved = all(not after[n].equal(before[n]) for n, p in model.predictor.named_parameters() if p.requires_grad)
    return found, frozen_bits, moved, keys == set(model.predictor.state_dict())


@pytest.mark.numeric
def test_frozen_and_trainable_parameters_share_a_unit(run_ranks):
    """B045: block 0 frozen, and all biases of block 1: it trains, frozen bits stay, every key stays."""
    expected = partly_frozen(0, 1)[0]
    for found, frozen_bits, moved, keys in run_ranks(partly_frozen, 2):
        assert_gradients_near(found, expected)
        assert (frozen_bits, moved, keys) == (True, True, True)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))


def changing_buffer(rank, world):
    model = Counting()
    parallelize(model, mesh=ParallelMesh.build(MeshSizes(replicate=world, shard=1)), plan=FSDPPlan(param_dtype=None))
    with pytest.raises(
        RuntimeError, match=r"changed the buffers norm.num_batches_tracked, norm.running_mean, .*every replica"
    ):
        model(torch.rand(4, 2))
    model.eval()
    model(torch.rand(4, 2))


def test_a_buffer_that_changes_in_the_forward_of_replicas_raises(run_ranks):
    run_ranks(changing_buffer, 2)


def prefetch_lists(rank, world, forward, backward):
    _, _, report = sharded(
        MeshSizes(shard=world),
        plan(num_to_forward_prefetch=forward, num_to_backward_prefetch=backward),
        build(layers=3),
    )
    return {s.name: (s.forward_prefetch, s.backward_prefetch) for s in report.sub_models}, report.notes


def test_prefetch_lists_are_what_the_plan_says(run_ranks):
    """B041: they never cross sub-models, and too large a number is clamped with a note."""
    b = [f"predictor.blocks.{i}" for i in range(3)]
    (lists, notes), _ = run_ranks(prefetch_lists, 2, 1, 2)
    assert notes == []
    assert lists["text_encoder"] == ({"text_encoder": []}, {"text_encoder": []})
    assert lists["predictor"][0] == {"predictor": b[:1], b[0]: b[1:2], b[1]: b[2:], b[2]: []}
    assert lists["predictor"][1] == {"predictor": [b[2], b[1]], b[0]: [], b[1]: b[:1], b[2]: [b[1], b[0]]}
    (lists, notes), _ = run_ranks(prefetch_lists, 2, 9, 0)
    assert notes == ["predictor: prefetch clamped to its 3 inner units"]
    assert lists["predictor"][0] == {"predictor": b, b[0]: b[1:], b[1]: b[2:], b[2]: []}
    assert set(map(tuple, lists["predictor"][1].values())) == {()}


def gathers_in_order(function):
    """("all_gather" | "pre_forward", unit) as they happen; before the first forward, units have no names yet."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    found = [(e.time_range.start, *e.name.removeprefix("FSDP::").rstrip(")").partition(" (")) for e in trace.events()]
    return [(kind, unit) for _, kind, _, unit in sorted(found) if kind in ("all_gather", "pre_forward")]


def cross_sub_model_prefetch(rank, world):
    features = FeaturesConfig(recompute=True, recompute_plan=RecomputePlan(apply_modules=PATTERNS))
    model, _, _ = sharded(MeshSizes(shard=world), plan(), features=features)
    prefetch_in_time = True

    def loss():
        x, t, ids, noise = batch(rank)
        with torch.no_grad():
            if prefetch_in_time:
                prefetch(model.predictor)
                prefetch(model.predictor)
            latents, text = model.ae(x), model.text_encoder(ids)
        return F.mse_loss(model.predictor(latents + noise, t, text), noise)

    orders, found = [], []
    for prefetch_in_time in (True, True, False):
        orders.append(gathers_in_order(lambda: loss().backward()))
        reset_frozen(model.text_encoder)
        found.append(gradients(model.predictor))
        model.zero_grad()
    return orders, found


@pytest.mark.numeric
def test_cross_sub_model_prefetch(run_ranks):
    """From the first step, into a sub-model under recompute: its gathers come first, and no second time."""
    expected = reference_gradients(range(2))
    for orders, found in run_ranks(cross_sub_model_prefetch, 2):
        first, second, without = orders
        assert first[:3] == [("all_gather", ""), ("all_gather", ""), ("pre_forward", "")]  # the last one: text_encoder
        assert second[:2] == [("all_gather", ""), ("all_gather", "blocks.0")]
        assert without[0] == ("pre_forward", "")
        assert len({sum(kind == "all_gather" for kind, _ in order) for order in orders}) == 1
        for one in found:
            assert_gradients_near(one, expected)


def accumulation(rank, world, sizes, every_step):
    model, mesh, _ = sharded(sizes, plan(reduce_every_micro_step=every_step))
    counts = []
    for micro in range(4):
        set_gradient_sync(model.predictor, is_last=micro == 3, reduce_every_micro_step=every_step)
        with count_communication(mesh) as counted:
            (model.loss(*batch(mesh.data_rank * 4 + micro)) / 4).backward()
            reset_frozen(model.text_encoder)
        counts.append((counted.total(kind="reduce_scatter").calls, counted.total(kind="all_reduce").calls))
    first = gradients(model.predictor)
    model.zero_grad()
    model.loss(*batch(mesh.data_rank * 4)).backward()  # synchronised again without being told
    return counts, first, gradients(model.predictor)


REDUCTIONS = {  # (replicas, shards), reduce_every_micro_step → (reduce-scatters, all-reduces) of each micro-step
    ((1, 4), False): [(0, 0), (0, 0), (0, 0), (3, 0)],
    ((1, 4), True): [(3, 0), (3, 0), (3, 0), (3, 0)],
    ((2, 2), False): [(0, 0), (0, 0), (0, 0), (3, 3)],
    ((2, 2), True): [(3, 0), (3, 0), (3, 0), (3, 3)],
}


def all_accumulations(rank, world):
    return [accumulation(rank, world, MeshSizes(*sizes), every_step) for sizes, every_step in REDUCTIONS]


@pytest.mark.numeric
def test_gradients_are_reduced_when_the_plan_says(run_ranks):
    """B037: a container of several roots, 4 micro-steps: reductions counted, gradients those of one big batch."""
    expected, afterwards = reference_gradients(range(16)), reference_gradients((0, 4, 8, 12))
    for outcomes in run_ranks(all_accumulations, 4, timeout=240):
        for counts, (found_counts, found, again) in zip(REDUCTIONS.values(), outcomes, strict=True):
            assert found_counts == counts
            assert_gradients_near(found, expected)
            assert_gradients_near(again, afterwards)


def test_process_group_backends_include_one_for_cpu_tensors():
    """B036: the gradient norm of offloaded parameters is reduced on the CPU."""
    assert process_group_backend("cpu") == "gloo"
    assert process_group_backend("cuda") == "cpu:gloo,cuda:nccl"


def offload_without_cpu_backend(rank, world):
    import torch.distributed as dist

    from mm_parallel.sharding import fsdp

    original = dist.get_backend_config
    dist.get_backend_config = lambda: "cuda:nccl"
    try:
        with pytest.raises(PlanError, match=r"cpu_offload of text_encoder: .*no backend for CPU tensors \(cuda:nccl\)"):
            sharded(MeshSizes(shard=world), plan(cpu_offload=True))
        assert fsdp.dist is dist
    finally:
        dist.get_backend_config = original


def test_offload_without_a_cpu_backend_is_refused(run_ranks):
    """B036: reported before anything is sharded, not at the first optimizer step."""
    run_ranks(offload_without_cpu_backend, 2)


def mesh_facts(rank, world):
    mesh = ParallelMesh.build(MeshSizes(replicate=2, shard=2, ulysses=2))
    same = mesh.fsdp() is mesh.fsdp(2)
    with pytest.raises(ValueError, match="shard size of 3 doesn't divide the 4 ranks"):
        mesh.fsdp(3)
    with pytest.raises(ValueError, match="1 × 2 = 2, but there are 4 ranks"):
        ParallelMesh.build(MeshSizes(shard=2))
    names = mesh.fsdp().mesh_dim_names, mesh.fsdp(4).mesh_dim_names
    return mesh.data_rank, mesh.data_size, mesh.context_rank, mesh.context_size, same, names, mesh.device


def test_mesh_coordinates(run_ranks):
    """B053: 4 ranks = data 2 × context 2; ranks of one context group read the same stream of samples."""
    facts = run_ranks(mesh_facts, 4)
    assert [f[:4] for f in facts] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert all(f[4] for f in facts)
    assert facts[0][5] == (("replicate", "shard"), ("shard",))
    assert facts[0][6] == torch.device("cpu")


def test_a_mesh_of_several_ranks_needs_a_process_group():
    with pytest.raises(RuntimeError, match="a mesh of 2 ranks needs init_process_group first"):
        ParallelMesh.build(MeshSizes(shard=2))
    with pytest.raises(RuntimeError, match="sharding needs init_process_group first"):
        ParallelMesh.build(MeshSizes()).fsdp()


def test_a_single_rank_is_not_sharded():
    model = Denoiser()
    mesh = ParallelMesh.build(MeshSizes())
    report = parallelize(model, mesh=mesh, plan=FSDPPlan(("blocks.{*}",), param_dtype=None))
    assert "FSDP2 bypassed" in str(report)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert type(model) is Denoiser
    assert isinstance(mesh.context_parallel(kernel="math"), ContextParallel)
    set_gradient_sync(model, is_last=False)
    prefetch(model)
    with pytest.raises(ValueError, match="expected a frozen module, but embed.weight is trainable"):
        reset_frozen(model)
    reset_frozen(model.requires_grad_(False))
