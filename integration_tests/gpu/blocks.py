r"""Blocks of the 14B shape on one GPU: forward and backward with recompute, bf16, 32,760 tokens.

    PYTHONPATH=packages/mm-models-wan/src:packages/mm-parallel/src \
        python integration_tests/gpu/blocks.py [--blocks 4] [--peak 989]

Prints seconds per step, model-FLOPs utilisation (three forwards' worth of products; the recomputed one isn't counted),
peak memory and attention's share of the time, for a residual stream in float32 and in bf16, eager and compiled. Needs
torch and these two packages, no diffusers. ``--tokens 256 --device cpu --blocks 1`` tries the script out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mm_models_wan.modules.dit import Block, Context, LocalTokens
from mm_models_wan.modules.rope import RotaryTables
from mm_models_wan.weights.architecture import ARCHITECTURES, TEXT_LENGTH, WanArchitecture
from mm_parallel import ContextParallel

SHAPE = WanArchitecture.parse(ARCHITECTURES["T2V-A14B"])
ROUNDS = 5


def grid_of(tokens: int) -> tuple[int, int, int]:
    """81 frames at 480×832 are 21 × 30 × 52 tokens; other counts become one flat row."""
    return (21, 30, 52) if tokens == 21 * 30 * 52 else (1, 1, tokens)


def block_flops(tokens: int) -> int:
    """FLOPs of one block's forward."""
    dim, text = SHAPE.dim, TEXT_LENGTH
    products = 6 * tokens * dim * dim + 2 * text * dim * dim + 2 * tokens * dim * SHAPE.ffn_dim
    return 2 * products + 4 * tokens * (tokens + text) * dim


class Timer:
    """Seconds of a function, by device events where there is a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: partial[None]) -> float:
        function()
        seconds = []
        for _ in range(ROUNDS):
            self._wait()
            start = time.perf_counter()
            function()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def step(blocks: nn.ModuleList, x: Tensor, vectors: tuple[Tensor, ...], context: Context, tokens: LocalTokens) -> None:
    for parameter in blocks.parameters():
        parameter.grad = None
    out = x
    for block in blocks:
        out = checkpoint(block, out, vectors, context, tokens, use_reentrant=False)
    out.backward(torch.ones_like(out))


def attention(q: Tensor, k: Tensor) -> None:
    """What recompute makes of one attention: two forwards and a backward."""
    with torch.no_grad():
        F.scaled_dot_product_attention(q, k, k)
    F.scaled_dot_product_attention(q, k, k).backward(q.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=21 * 30 * 52)
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of the device")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device, tokens = torch.device(arguments.device), arguments.tokens
    timer, dim, heads = Timer(device), SHAPE.dim, SHAPE.num_attention_heads

    torch.manual_seed(0)
    with device:
        blocks = nn.ModuleList(Block(SHAPE) for _ in range(arguments.blocks)).to(torch.bfloat16)
        text = torch.randn(1, TEXT_LENGTH, dim, dtype=torch.bfloat16)
        vectors = tuple(torch.randn(1, 1, dim) for _ in range(6))
        cos, sin = RotaryTables(SHAPE.attention_head_dim, max(1024, tokens))(grid_of(tokens), device)
        local = LocalTokens(ContextParallel.single().shard(tokens), cos, sin)
        q, k = (torch.randn(1, heads, tokens, dim // heads, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        attended = timer(partial(attention, q, k)) * arguments.blocks
        del q, k
    print(f"torch {torch.__version__}, {arguments.blocks} blocks, {tokens} tokens, {arguments.peak:g} TFLOP/s peak")
    print("| residual | blocks | s/step | MFU | peak GiB | attention's share |\n|---|---|---|---|---|---|")
    useful = 3 * arguments.blocks * block_flops(tokens) / 1e12
    for compiled in (False, True) if device.type != "cpu" else (False,):
        if compiled:
            for block in blocks:
                block.forward = torch.compile(block.forward)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1, tokens, dim, dtype=dtype, device=device, requires_grad=True)
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            seconds = timer(partial(step, blocks, x, vectors, Context(text, None), local))
            peak = torch.accelerator.max_memory_allocated() / 2**30 if device.type != "cpu" else float("nan")
            name = "fp32" if dtype == torch.float32 else "bf16"
            kind = "compiled" if compiled else "eager"
            share, utilisation = attended / seconds, useful / seconds / arguments.peak
            print(f"| {name} | {kind} | {seconds:.3f} | {utilisation:.1%} | {peak:.1f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
