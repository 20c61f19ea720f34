"""What `parallelize` costs on one rank, where it bypasses FSDP2: 36 M parameters, fp32, forward and backward.

    python benchmarks/one_rank_overhead.py [--pairs 7] [--tokens 1024]

The bare module and the parallelized one take turns; medians and their ratio. Beside them FSDP2 on a one-rank mesh.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, parallelize


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--pairs", type=int, default=7)
    arguments.add_argument("--tokens", type=int, default=1024)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bare, ours, theirs = (Transformer(dim=512, layers=8, heads=8, hidden=3328) for _ in range(3))
    plan = FSDPPlan(apply_modules=("blocks.{*}",), param_dtype=None)
    parallelize(ours, mesh=ParallelMesh.build(MeshSizes()), plan=plan)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*theirs.blocks, theirs):
        fully_shard(module, mesh=mesh)
    print(f"{sum(p.numel() for p in bare.parameters()) / 1e6:.1f} M parameters, {options.tokens} tokens")
    x = torch.randn(1, options.tokens, 512)
    runs: dict[str, Callable[[], None]] = {
        name: lambda model=model: model(x).square().mean().backward()  # type: ignore[misc]
        for name, model in (("bare", bare), ("parallelize", ours), ("FSDP2", theirs))
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(options.pairs + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repetition:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["bare"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<12} {median:.3f} s   {100 * (median / base - 1):+.1f} % over bare")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
