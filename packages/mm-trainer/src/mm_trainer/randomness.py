"""Randomness that belongs to the sample: every draw is keyed by (seed, stream, sample key).

[Note: sample-keyed randomness]
Noise, timestep, caption dropout and augmentation of a sample depend on the sample's position in the global data order
and on nothing else: not on the rank, the batch it landed in, the worker that read it, or what was drawn before. Peers
of a context-parallel group therefore agree without communication, and a resumed run redraws what the unbroken one drew.
Draws are made on the CPU, so that they are the same on every device.

Code that knows nothing of this draws from the global generators: dropout, a data set's augmentation. They are set too,
before anybody draws (`seed_generators`): for a data set's ``load``, from the sample's key; for a model's forward, from
the key of the micro-batch's first sample. A dropout mask thus belongs to the micro-batch: it is the same on one rank
and on many as long as ``micro_batch_size`` is, the same for all ranks that share the micro-batch (so that a whole
activation gets one mask), and the same in a resumed run; with another micro-batch size the masks are others. It can't
belong to the single sample, since torch draws one mask for a whole tensor. An activation that is split over ranks needs
masks that differ between them: `mm_parallel.SequenceShard.local_randomness`. Recompute restores torch's generators.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def keyed_generator(seed: int, stream: str, key: int) -> torch.Generator:
    """A CPU generator whose state is a function of its three arguments.

    Args:
        seed: the run's seed.
        stream: what is drawn (``"noise"``, ``"sigma"``, ``"caption_dropout"``); streams are independent.
        key: the sample's position in the global data order.
    """
    return torch.Generator().manual_seed(_number(seed, stream, key))


def seed_generators(seed: int, stream: str, key: int, device: torch.device | None = None) -> None:
    """Set the global generators (torch's on the CPU and on ``device``, numpy's, Python's) by the three numbers alone.

    Args:
        seed: the run's seed.
        stream: what draws next.
        key: the sample's position in the global data order, of the first one where there are several.
        device: the rank's accelerator, if it has one.
    """
    number = _number(seed, stream, key)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would wake an accelerator in a data worker
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def _number(seed: int, stream: str, key: int) -> int:
    """63 bits that depend on all three."""
    digest = hashlib.blake2b(f"{seed}\0{stream}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_normal(seed: int, stream: str, sample_key: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal values, float32, on the CPU.

    Args:
        sample_key: (B,) int64.
        shape: shape of one sample.

    Returns:
        (B, *shape); row i depends on ``sample_key[i]`` alone.
    """
    rows = [torch.randn(*shape, generator=keyed_generator(seed, stream, key)) for key in sample_key.tolist()]
    return torch.stack(rows)


def keyed_uniform(seed: int, stream: str, sample_key: Tensor) -> Tensor:
    """(B,) float64 in [0, 1), one value per sample; ``sample_key``: (B,) int64."""
    rows = [
        torch.rand((), dtype=torch.float64, generator=keyed_generator(seed, stream, key)) for key in sample_key.tolist()
    ]
    return torch.stack(rows)


def draw_quantile(batch: Mapping[str, Any], seed: int) -> Tensor:
    """Where in the distribution of noise levels each sample of a batch stands.

    A model makes its own noise level of it: σ by `NoiseSchedule.at`, a discrete step t by ``(u * steps).long()``. Any
    other objective that draws a number per sample and wants it fixed in validation may use it likewise.

    Args:
        batch: the batch as the model got it; its ``quantile``, which validation fixes, comes before any draw.
        seed: the run's seed.

    Returns:
        (B,) float64 in [0, 1), on the CPU.
    """
    fixed: Tensor | None = batch.get("quantile")
    return keyed_uniform(seed, "sigma", batch["sample_key"]) if fixed is None else fixed.cpu()
