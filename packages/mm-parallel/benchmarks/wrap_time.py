"""How long wrapping takes: 40 layers, 14 B parameters, on meta, in a simulated process group.

python benchmarks/wrap_time.py [--world 64]
"""

from __future__ import annotations

import argparse
import time

import torch.distributed as dist
from common import Transformer
from torch.testing._internal.distributed.fake_pg import FakeStore

from mm_parallel import FSDPPlan, MeshSizes, ParallelMesh, meta_parameters, parallelize


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--world", type=int, default=64)
    world = arguments.parse_args().world
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    start = time.perf_counter()
    with meta_parameters():
        model = Transformer(dim=5120, layers=40, heads=40, hidden=24576)
    built = time.perf_counter()
    mesh = ParallelMesh.build(MeshSizes(shard=world))
    report = parallelize(model, mesh=mesh, plan=FSDPPlan(apply_modules=("blocks.{*}",)))
    wrapped = time.perf_counter()
    print(report)
    numel = sum(p.numel() for p in model.parameters()) / 1e9
    print(
        f"{numel:.2f} B parameters, {world} ranks: built in {built - start:.2f} s, wrapped in {wrapped - built:.2f} s"
    )


if __name__ == "__main__":
    main()
