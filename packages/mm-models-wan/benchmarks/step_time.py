"""One training step of a 36 M-parameter DiT: ours, diffusers', and the floor of the bare matrix products.

    python step_time.py [--rounds 7] [--compiled]    time: median of interleaved rounds; --compiled adds compiled blocks
    python step_time.py --memory                     peak memory above the import base, each in a process of its own

Forward and backward, fp32, one sample, 512 text positions, equal weights and inputs. The floor makes the same matrix
products and attentions, and nothing else. Times are CPU seconds of one thread, which other work on the machine disturbs
less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mm_models_wan.modules.predictor import WanPredictor
from mm_models_wan.weights.architecture import WanArchitecture
from mm_models_wan.weights.key_map import WAN2_2

DIM, LAYERS, HEADS, FFN, TEXT = 512, 8, 8, 2048, 512
SHAPES: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_dim": DIM // HEADS,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": DIM,
    "freq_dim": 256,
    "ffn_dim": FFN,
    "num_layers": LAYERS,
}
GRIDS = {256: (4, 16, 16), 1024: (4, 32, 32)}


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents, timestep, text and target."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, *GRIDS[tokens], generator=generator)
    text = torch.randn(1, TEXT, DIM, generator=generator)
    return latents, torch.tensor([731.0]), text, torch.randn(latents.shape, generator=generator)


def make_reference() -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(**SHAPES)


def make_ours(reference: Any | None = None) -> WanPredictor:
    model = WanPredictor(WanArchitecture.parse(SHAPES))
    if reference is not None:
        state = reference.state_dict()
        names = WAN2_2.rename_all(state, to="native")
        model.load_state_dict({names[key]: value for key, value in state.items()})
    return model


class Floor:
    """The matrix products and attentions of the model, forward and backward, and nothing between them.

    Every product has inputs of its own, and the backward starts when the last forward is done: operands come from
    memory as they do in a model, not from a cache that the product before has just filled. (Chained without the norms
    between them, the numbers would fade into denormals, which are slow.)
    """

    def __init__(self, tokens: int) -> None:
        self.products: list[tuple[Callable[..., Tensor], list[Tensor], Tensor]] = []
        patch = 16 * 2 * 2
        self._linear(tokens, patch, DIM, is_input=True)
        self._linear(TEXT, DIM, DIM, is_input=True)
        self._linear(TEXT, DIM, DIM)
        self._linear(1, 256, DIM, is_input=True)  # the time embedding
        self._linear(1, DIM, DIM)
        self._linear(1, DIM, 6 * DIM)
        for _ in range(LAYERS):
            for length in 6 * [tokens] + 2 * [TEXT]:  # q, k, v, o of both attentions; two read the text
                self._linear(length, DIM, DIM)
            self._linear(tokens, DIM, FFN)
            self._linear(tokens, FFN, DIM)
            for keys in (tokens, TEXT):
                self._attention(tokens, keys)
        self._linear(tokens, DIM, patch)

    def _linear(self, rows: int, inputs: int, outputs: int, *, is_input: bool = False) -> None:
        """``is_input``: what it reads needs no gradient."""
        x = torch.randn(1, rows, inputs).requires_grad_(not is_input)
        self.products.append((nn.Linear(inputs, outputs), [x], torch.randn(1, rows, outputs)))

    def _attention(self, tokens: int, keys: int) -> None:
        q, k, v, gradient = (
            torch.randn(1, n, HEADS, DIM // HEADS).transpose(1, 2) for n in (tokens, keys, keys, tokens)
        )
        operands = [x.requires_grad_() for x in (q, k, v)]
        self.products.append((F.scaled_dot_product_attention, operands, gradient))

    def __call__(self) -> Tensor:
        done = []
        for product, operands, gradient in self.products:
            if isinstance(product, nn.Linear):
                product.zero_grad(set_to_none=True)
            done.append((product(*(x.detach().requires_grad_(x.requires_grad) for x in operands)), gradient))
        while done:
            output, gradient = done.pop()
            output.backward(gradient)
        return torch.zeros(())


def step_of(kind: str, tokens: int, recompute: bool, reference: Any | None = None) -> Callable[[], Tensor]:
    """A function that makes one forward and backward and returns the loss."""
    latents, timestep, text, target = inputs(tokens)
    if kind == "floor":
        return Floor(tokens)
    if kind == "diffusers":
        model = reference or make_reference()
        if recompute:
            model.enable_gradient_checkpointing()
        else:
            model.disable_gradient_checkpointing()
        predict = lambda: model(latents, timestep, text, return_dict=False)[0]  # noqa: E731
    else:
        model = make_ours(reference)
        for block in model.blocks:
            if kind == "compiled":
                block.forward = torch.compile(block.forward, fullgraph=True)
            if recompute:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        predict = lambda: model(latents, timestep, text)  # noqa: E731
    model.train()
    return lambda: run(model, lambda: (predict() - target).square().mean())


def run(model: nn.Module, loss_of: Callable[[], Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = loss_of()
    loss.backward()
    return loss.detach()


def measure_time(rounds: int, compiled: bool) -> None:
    torch.set_num_threads(1)
    reference = make_reference()
    print(f"{sum(p.numel() for p in reference.parameters()) / 1e6:.1f} M parameters, {rounds} rounds")
    for tokens in GRIDS:
        for recompute in (False, True):
            kinds = ["ours", "diffusers", *([] if recompute else ["floor"]), *(["compiled"] if compiled else [])]
            steps = {kind: step_of(kind, tokens, recompute, reference) for kind in kinds}
            losses = {kind: step().item() for kind, step in steps.items()}  # the first step warms up
            assert abs(losses["ours"] - losses["diffusers"]) < 1e-4 * losses["diffusers"]
            seconds = interleaved(steps, rounds)
            median = {kind: statistics.median(values) for kind, values in seconds.items()}
            ratios = {
                kind: statistics.median(a / b for a, b in zip(seconds["ours"], seconds[kind], strict=True))
                for kind in kinds[1:]
            }
            shown = ", ".join(f"{kind} {value:.3f} s" for kind, value in median.items())
            against = ", ".join(f"{ratio:.3f} x {kind}" for kind, ratio in ratios.items())
            print(
                f"{tokens:5d} tokens, recompute {'on ' if recompute else 'off'}: {shown}; ours is {against}", flush=True
            )


def interleaved(steps: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step, round by round; who goes first changes from round to round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for index in range(rounds):
        for kind, step in list(steps.items())[:: 1 - 2 * (index % 2)]:
            gc.collect()
            start = time.process_time()
            step()
            seconds[kind].append(time.process_time() - start)
    return seconds


def peak_megabytes() -> float:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measure_own_memory(kind: str, tokens: int, recompute: bool) -> None:
    """In a fresh process: print the peak above what the imports took."""
    import diffusers.models.transformers.transformer_wan  # noqa: F401

    with open("/proc/self/clear_refs", "w", encoding="utf-8") as control:
        control.write("5")  # the peak counts from now on
    base = peak_megabytes()
    step = step_of(kind, tokens, recompute)
    for _ in range(2):
        step()
    print(peak_megabytes() - base)


def measure_memory() -> None:
    for tokens in GRIDS:
        for recompute in (False, True):
            peaks = {}
            for kind in ("ours", "diffusers"):
                command = [sys.executable, __file__, "--own-memory", kind, str(tokens), str(int(recompute))]
                # One arena and a low threshold: freed memory goes back, so that the peak is that of live tensors.
                environ = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
                answer = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=300)
                peaks[kind] = float(answer.stdout)
            print(
                f"{tokens:5d} tokens, recompute {'on ' if recompute else 'off'}: ours {peaks['ours']:.0f} MB, "
                f"diffusers {peaks['diffusers']:.0f} MB, ratio {peaks['ours'] / peaks['diffusers']:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--own-memory", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own_memory:
        name, count, recomputed = arguments.own_memory
        measure_own_memory(name, int(count), bool(int(recomputed)))
    elif arguments.memory:
        measure_memory()
    else:
        measure_time(arguments.rounds, arguments.compiled)
