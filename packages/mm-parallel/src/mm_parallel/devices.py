"""Which device this process computes on: the one place that asks.

A build of torch and the machine can disagree. ``torch.accelerator.current_accelerator()`` says what a build was made
for: pip's CUDA build answers ``cuda`` on a machine without a GPU, and fails at the first call; ``torch_npu`` without a
device does the same. And there may be a device on which neither FSDP2 nor a process group runs.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

log = logging.getLogger(__name__)

UNSUPPORTED = ("mps",)
"""Accelerators without a process-group backend in torch: nothing can be sharded over them."""


@cache
def accelerator() -> torch.device | None:
    """The accelerator to compute on, without an index; None if there is only the CPU. A fallback is logged."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None:
        return None
    if built_for.type in UNSUPPORTED:
        log.info("there is no sharded training on %s: everything runs on the CPU", built_for.type)
        return None
    if torch.accelerator.current_accelerator(check_available=True) is None:
        log.info("this torch is built for %s, but no such device is here: everything runs on the CPU", built_for.type)
        return None
    return built_for


def default_device_type() -> str:
    """``cuda``, ``npu``, …: the type of `accelerator`, else ``cpu``."""
    device = accelerator()
    return "cpu" if device is None else device.type


def device_count() -> int:
    """Accelerators that this process sees; 0 if there is only the CPU."""
    return 0 if accelerator() is None else torch.accelerator.device_count()
