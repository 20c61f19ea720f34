"""The build path under simulated ranks: nothing is sent, no value means anything, but every call must fit."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from par_models import Pipeline, batch
    from mm_parallel import *

    world = {world}
    dist.init_process_group("fake", store=FakeStore(), rank=world - 3, world_size=world)
    sub_plans = {{"text_encoder": SubPlan(shard_size=8)}}
    plan = FSDPPlan(("predictor.blocks.{{*}}",), ("ae",), param_dtype=None, sub_plans=sub_plans)
    config = ParallelConfig(ulysses_parallel_size=2, ring_attention_size=4, fsdp_plan=plan)
    mesh = ParallelMesh.build(MeshSizes.resolve(config, world))
    with meta_parameters():
        model = Pipeline()
    blocks = ("predictor.blocks.{{*}}",)
    features = FeaturesConfig(
        recompute=True,
        recompute_plan=RecomputePlan(blocks),
        enable_activation_offload=True,
        activation_offload_plan=ActivationOffloadPlan(blocks),
    )
    apply_features(model, features)
    subs = {{"ae": model.ae, "text_encoder": model.text_encoder, "predictor": model.predictor}}
    report = parallelize(model, mesh=mesh, plan=plan, sub_models=subs)
    materialize(model, mesh.device)
    initializer = KeyedInitializer(0)
    for name, parameter in model.named_parameters():
        initializer.normal_(parameter, name, std=0.02)
    model.predictor.set_context_parallel(mesh.context_parallel())
    optimizer = torch.optim.AdamW(model.predictor.parameters())
    with count_communication(mesh) as counted:
        for micro in range(2):
            set_gradient_sync(model.predictor, is_last=micro == 1)
            prefetch(model.predictor)
            model.loss(*batch(micro, tokens=75)).backward()
            reset_frozen(model.text_encoder)
    clip_grad_norm(model.predictor.parameters(), 1.0)
    optimizer.step()
    print(counted.total(kind="send", axis="ring").calls, counted.total(kind="reduce_scatter").calls)
    print(report)
"""


@pytest.mark.parametrize("world", [64])
def test_the_whole_path_runs_on_simulated_ranks(world):
    """Sub-plans, 2 × 4 context parallelism, features, accumulation, clipping and AdamW, unchanged."""
    tests = __file__.rsplit("/", 1)[0]
    script = textwrap.dedent(SCRIPT).format(tests=tests, world=world)
    command = [sys.executable, "-W", "ignore", "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    # 2 micro-steps × 2 layers × 3 hops × (forward, recompute, and two in the backward); one reduction of 3 units
    assert out.stdout.splitlines()[0] == "48 3"
    assert "predictor: 64 shards" in out.stdout
    assert "text_encoder: 8 shards × 8 replicas" in out.stdout
