"""Context-parallel attention, forward and backward, against diffusers' and torch's own.

    torchrun --nproc-per-node 2 benchmarks/attention_speed.py [--pairs 7] [--torch]

S 4096, 8 heads of 64, fp32, one thread per rank; medians of interleaved repetitions, and the largest error of output
and gradients against one process. diffusers' context parallelism doesn't run on a CPU as shipped. It gets the two
patches that it needs: a device count above zero, and a kernel that returns the log-sum-exp for its ring.
``--torch`` adds the forward of ``torch.distributed.tensor.experimental.context_parallel``: it has no backward on a
CPU, and its first call takes about a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from mm_parallel import MeshSizes, ParallelMesh

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--pairs", type=int, default=7)
    arguments.add_argument("--torch", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v, upstream = torch.randn(4, 1, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).unbind()
    reference = step(plain, q, k, v, upstream)
    forms = {
        "ours, ring": ours(MeshSizes(shard=world, ring=world)),
        "ours, ulysses": ours(MeshSizes(shard=world, ulysses=world)),
        "diffusers, ring": diffusers(world, ring=world),
        "diffusers, ulysses": diffusers(world, ulysses=world),
    }
    part = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    local = [t[:, part].contiguous() for t in (q, k, v, upstream)]
    times: dict[str, list[float]] = {name: [] for name in forms}
    errors: dict[str, float] = {}
    for repetition in range(options.pairs + 1):  # the first one warms up
        for name, form in forms.items():
            dist.barrier()
            start = time.perf_counter()
            found = step(form, *local)
            dist.barrier()
            if repetition:
                times[name].append(time.perf_counter() - start)
            errors[name] = max((a - b[:, part]).abs().max().item() for a, b in zip(found, reference, strict=True))
    report(times, errors)
    if options.torch:
        torch_forward(q, k, v)
    dist.destroy_process_group()


def step(form: Attention, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """→ out, dq, dk, dv."""
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    out = form(q, k, v)
    out.backward(tensors[3])
    return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def ours(sizes: MeshSizes) -> Attention:
    return ParallelMesh.build(sizes).context_parallel().shard(TOKENS).attention


def diffusers(world: int, ring: int = 1, ulysses: int = 1) -> Attention:
    from diffusers.models import attention_dispatch
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    config.setup(dist.get_rank(), world, torch.device("cpu"), mesh)
    parallel = ParallelConfig(context_parallel_config=config)
    native = attention_dispatch._native_attention_forward_op, attention_dispatch._native_attention_backward_op
    forward, backward = (_lse_forward, _lse_backward) if ring > 1 else native

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_dispatch._templated_context_parallel_attention(
            q, k, v, None, 0.0, False, None, False, False,
            forward_op=forward, backward_op=backward, _parallel_config=parallel,
        )  # fmt: skip

    return attend


def _lse_forward(ctx, q, k, v, *_args, _save_ctx=True, **_kwargs):  # type: ignore[no-untyped-def]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    if _save_ctx:
        ctx.save_for_backward(*(t.transpose(1, 2) for t in (q, k, v)))
    return out.transpose(1, 2), lse.transpose(1, 2)


def _lse_backward(ctx, grad_out, *, query, key, value, out, lse):  # type: ignore[no-untyped-def]
    grad_out, q, k, v, out = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(grad_out, q, k, v, out, lse.transpose(1, 2).contiguous(), 0.0, False)
    return tuple(g.transpose(1, 2) for g in grads)


def report(times: dict[str, list[float]], errors: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            print(f"{name:<20} {medians[name]:.3f} s (min {min(values):.3f})   largest error {errors[name]:.1e}")
        best = {who: min(m for n, m in medians.items() if n.startswith(who)) for who in ("ours", "diffusers")}
        ratio = best["diffusers"] / best["ours"]
        print(f"{dist.get_world_size()} ranks, better form each: ours is {ratio:.2f} × as fast")


def torch_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Seconds only: on a CPU it gathers instead of rotating, and hands back all tokens of some heads."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers = [t.transpose(1, 2).clone() for t in (q, k, v)]
    with torch.no_grad(), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        for name in ("first call", "second call"):
            start = time.perf_counter()
            out = F.scaled_dot_product_attention(*buffers)
            if dist.get_rank() == 0:
                seconds = time.perf_counter() - start
                print(f"torch, forward only, {name}: {seconds:.2f} s, {tuple(out.shape)} on each rank")


if __name__ == "__main__":
    main()
