"""What a run depends on besides its configuration: versions, devices, plugins, variables."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from mm_trainer import registry
from mm_trainer.config.environment import Environment

_PACKAGES = (
    "mm-trainer",
    "mm-parallel",
    "mm-checkpoint",
    "torch",
    "torch-npu",
    "safetensors",
    "numpy",
    "pydantic",
    "av",
    "diffusers",
    "transformers",
    "torchao",
)
_VARIABLES = ("OMP_", "CUDA_", "ASCEND_", "NCCL_", "HCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HF_", "SLURM_JOB_ID")


def environment_report() -> dict[str, Any]:
    """Versions, devices, plugins and the environment variables that change how torch runs, as plain values."""
    variables = Environment.read().variables
    providers = {
        provider.distribution: provider.version
        for group in registry.GROUPS
        for offers in registry.installed(group).values()
        for provider in offers
    }
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in (*_PACKAGES, *sorted(providers.keys() - set(_PACKAGES)))},
        "devices": _devices(),
        "plugins": {
            group: {name: str(offers[0]) for name, offers in registry.installed(group).items()}
            for group in registry.GROUPS
        },
        "variables": {name: value for name, value in sorted(variables.items()) if _is_telling(name)},
    }


def _is_telling(name: str) -> bool:
    return name.startswith(_VARIABLES) and not any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASSWORD"))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """Names of the accelerators, ``cpu`` where there is none."""
    import torch

    from mm_parallel import accelerator, device_count

    device = accelerator()
    if device is None:
        return ["cpu"]
    names = torch.get_device_module(device)
    return [f"{device.type}:{i} {names.get_device_name(i)}" for i in range(device_count())]
