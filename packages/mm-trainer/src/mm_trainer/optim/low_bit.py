"""AdamW with fewer bytes: moments in 8 bits, and bf16 weights that are rounded stochastically.

[Note: layout-independent low-bit state]
What a step computes doesn't depend on how parameters are sharded, so a run resumes on any number of ranks, and replicas
stay equal. Two rules ensure this. A block of 8-bit values is within one row, and ranks hold whole rows. And the random
bits of the rounding are a hash of (seed, parameter, step, position in the whole parameter): no generator's state has to
be saved, shards draw different bits, and replicas draw the same.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mm_trainer.optim.shards import first_element, local, split_by_rows, zeros_per_row

SMALLEST_QUANTIZED = 4096
"""Parameters with fewer elements keep their moments in float32."""
_PIECE = 2**22
"""Elements updated at a time, so that intermediate results take little memory; a multiple of the block."""
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Name → whether its values have a sign."""


class BlockQuantizer:
    """torchao's 8-bit code: 256 values share a scale, and a value is one of 256 fractions of it (arXiv:2110.02861).

    The nearest fraction is found by one `torch.bucketize`, where torchao's own search takes thirty kernels unless it is
    compiled. So nothing here needs a compiler, and it runs wherever torch does.

    Raises:
        ImportError: torchao is not installed, or is too old.
    """

    block = 256

    def __init__(self) -> None:
        self._torchao = importlib.import_module("torchao.optim.quant_utils")
        self._fractions: dict[tuple[bool, torch.device], Tensor] = {}

    def encode(self, values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        """(n × 256,) float32 → codes (n × 256,) uint8 and scales (n,) float32."""
        scaled, scale = self._torchao.scale_tensor(values, self.block)
        fractions = self._fractions_of(signed, values.device)
        midpoints = (fractions[:-1] + fractions[1:]) / 2
        return torch.bucketize(scaled, midpoints, out_int32=True, right=True).to(torch.uint8), scale

    def decode(self, codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
        """The inverse of `encode`, up to what the code loses."""
        decoded: Tensor = self._torchao.dequant_with_qmap(codes, self._fractions_of(signed, codes.device), scale)
        return decoded

    def _fractions_of(self, signed: bool, device: torch.device) -> Tensor:
        key = (signed, device)
        if key not in self._fractions:
            self._fractions[key] = torch.tensor(self._torchao.create_dynamic_map(signed=signed), device=device)
        return self._fractions[key]


class LowBitAdamW(Optimizer):
    """AdamW whose arithmetic is float32, whatever its state and weights are stored in.

    bf16 weights are rounded stochastically, so that updates below their resolution count on average; others are
    stored as they are. See [Note: layout-independent low-bit state].

    Args:
        groups: parameter groups with ``params``, ``weight_decay``.
        names: parameter → full name, from which its random bits are keyed.
        seed: of the random bits.
        quantizer: stores the moments of large matrices in 8 bits; None: all in float32.
    """

    found_inf: Tensor | None = None
    """0-dim; 1 leaves weights and state alone, and the host doesn't wait for it."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        names: Mapping[Tensor, str],
        seed: int,
        quantizer: BlockQuantizer | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._quantizer = quantizer
        self._keys = {parameter: zlib.crc32(f"{seed}/{name}".encode()) for parameter, name in names.items()}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter that hasn't been updated yet."""
        state = {"step": torch.zeros((), device=parameter.device)}
        for name in _MOMENTS:
            if self._is_quantized(parameter):
                assert self._quantizer is not None
                columns = parameter.shape[1:].numel() // self._quantizer.block
                state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[f"{name}_scale"] = zeros_per_row(parameter, columns)
            else:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        return state

    def _is_quantized(self, parameter: Tensor) -> bool:
        """A rule on the whole parameter, so that the state has one form on every layout."""
        if self._quantizer is None or parameter.ndim < 2 or parameter.numel() < SMALLEST_QUANTIZED:
            return False
        return parameter.shape[1:].numel() % self._quantizer.block == 0 and split_by_rows(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` isn't supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.new_state(parameter)
                self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        # On the device throughout: reading it on the host would cost a synchronisation per parameter.
        bad = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf.to(parameter.device)
        step = state["step"].add_(1 - bad)
        (beta1, beta2), lr = group["betas"], group["lr"]
        correction1, correction2 = 1 - beta1**step, (1 - beta2**step).sqrt()
        weight, skip = local(parameter), bad.bool()
        first = first_element(parameter)
        for piece in _pieces(weight, local(gradient), state):
            old, slope = piece["weight"].float(), piece["gradient"].float()
            mean = self._read(piece, "exp_avg").lerp(slope, 1 - beta1)
            square = self._read(piece, "exp_avg_sq").lerp(slope.square(), 1 - beta2)
            new = old - lr * group["weight_decay"] * old
            new -= lr * (mean / correction1) / (square.sqrt() / correction2 + group["eps"])
            if weight.dtype == torch.bfloat16:
                new = round_stochastically(new, random_bits(first, len(new), self._keys[parameter], step))
            first += len(new)
            # `where`, not a multiplication by 0: 0 · NaN is NaN and would poison the weight.
            piece["weight"].copy_(torch.where(skip, piece["weight"], new))
            self._write(piece, "exp_avg", mean, skip)
            self._write(piece, "exp_avg_sq", square, skip)

    def _read(self, piece: dict[str, Tensor], name: str) -> Tensor:
        if name in piece:
            return piece[name]
        assert self._quantizer is not None
        return self._quantizer.decode(piece[f"{name}_codes"], piece[f"{name}_scale"], signed=_MOMENTS[name])

    def _write(self, piece: dict[str, Tensor], name: str, values: Tensor, skip: Tensor) -> None:
        new = {name: values}
        if name not in piece:
            assert self._quantizer is not None
            codes, scale = self._quantizer.encode(values, signed=_MOMENTS[name])
            new = {f"{name}_codes": codes, f"{name}_scale": scale}
        for key, value in new.items():
            piece[key].copy_(torch.where(skip, piece[key], value))


def _pieces(weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Flat views of a parameter's local shard, its gradient and its state, a few million elements at a time."""
    whole = {key: local(value) for key, value in state.items() if key != "step"}
    whole |= {"weight": weight, "gradient": gradient.contiguous()}
    for start in range(0, weight.numel(), _PIECE):
        piece = {}
        for key, tensor in whole.items():
            flat = tensor.view(-1)
            share = weight.numel() // flat.numel()  # 256 for scales, otherwise 1
            piece[key] = flat[start // share : (start + _PIECE) // share]
        yield piece


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 → bf16, up or down with the probability that makes the mean right.

    Args:
        values: any shape.
        bits: same shape, int32, uniform in [0, 2^16): what is added below the last bit that bf16 keeps.
    """
    carried = values.view(torch.int32) + bits
    return (carried & -(2**16)).view(torch.float32).to(torch.bfloat16)


def random_bits(first: int, count: int, key: int, step: Tensor) -> Tensor:
    """16 uniform bits for each of ``count`` positions from ``first`` on, as int32: a hash of (key, step, position).

    Args:
        key: 32 bits.
        step: 0-dim, on the device that is computed on; it is not read on the host.
    """
    position = torch.arange(count, dtype=torch.int32, device=step.device) + _wrapped(first)
    return _mix(position ^ _mix(_mix(step.int()) ^ _wrapped(key))) & 0xFFFF


def _mix(value: Tensor) -> Tensor:
    """A bijection of int32 that looks random: the finaliser of MurmurHash3, in arithmetic that wraps around."""
    value = (value ^ ((value >> 16) & 0xFFFF)) * _wrapped(0x85EBCA6B)
    value = (value ^ ((value >> 13) & 0x7FFFF)) * _wrapped(0xC2B2AE35)
    return value ^ ((value >> 16) & 0xFFFF)


def _wrapped(value: int) -> int:
    """The int32 with the same last 32 bits."""
    return (value + 2**31) % 2**32 - 2**31
