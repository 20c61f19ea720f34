"""Bytes on the wire of one step over the README's formulas, and saved activations over one rank's.

    python benchmarks/step_bytes.py

In a simulated process group of 64 ranks: calls and shapes are real, values are not. The tests hold the same formulas
on real ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from common import Transformer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, count_communication, parallelize

WORLD, DIM, LAYERS, HEADS, HIDDEN, TOKENS = 64, 256, 4, 8, 1000, 2048


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=WORLD)
    alone = saved_bytes(Transformer(DIM, LAYERS, HEADS, HIDDEN))
    for sizes in (
        MeshSizes(1, 64),
        MeshSizes(8, 8),
        MeshSizes(1, 64, ulysses=4),
        MeshSizes(1, 64, ring=4),
        MeshSizes(1, 64, ulysses=2, ring=2),
        MeshSizes(8, 8, ulysses=4, ring=2),
    ):
        model = Transformer(DIM, LAYERS, HEADS, HIDDEN)
        formula = expected(model, sizes)
        mesh = ParallelMesh.build(sizes)
        model.context_parallel = mesh.context_parallel()
        parallelize(model, mesh=mesh, plan=FSDPPlan(apply_modules=("blocks.{*}",), param_dtype=None))
        with count_communication(mesh) as counted:
            model(torch.randn(1, TOKENS, DIM)).square().mean().backward()
        ratios = {kind: counted.total(kind=kind).bytes / sent for kind, sent in formula.items() if sent}
        share = ""
        if sizes.context > 1:
            model = Transformer(DIM, LAYERS, HEADS, HIDDEN)
            model.context_parallel = mesh.context_parallel()
            kept = saved_bytes(model) / alone
            share = f"; activations {kept:.3f} of one rank's (1/{sizes.context} = {1 / sizes.context:.3f})"
        shown = ", ".join(f"{kind} {ratio:.4f}" for kind, ratio in ratios.items())
        print(f"{sizes}: counted / formula: {shown}{share}")
    dist.destroy_process_group()


def expected(model: nn.Module, sizes: MeshSizes) -> dict[str, int]:
    """Bytes that one rank sends, by the formulas; fp32, without the padding of first dimensions."""
    numel, shard, replicate = sum(p.numel() for p in model.parameters()), sizes.shard, sizes.replicate
    ulysses, ring = sizes.ulysses, sizes.ring
    local_q = 4 * math.ceil(TOKENS / sizes.context) * DIM
    return {
        "all_gather": 2 * 4 * numel * (shard - 1) // shard + (sizes.context - 1) * local_q,
        "reduce_scatter": 4 * numel * (shard - 1) // shard,
        "all_reduce": 2 * 4 * numel // shard * (replicate - 1) // replicate,
        "all_to_all": 8 * LAYERS * local_q * (ulysses - 1) // ulysses,
        "send": 3 * LAYERS * (ring - 1) * 2 * local_q,
    }


def saved_bytes(model: Transformer) -> int:
    """Bytes that the graph of one forward keeps: each storage once, parameters left out."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(1, TOKENS, DIM)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum()
    return sum(kept.values())


if __name__ == "__main__":
    main()
