"""Stand-ins for builds of torch that disagree with the machine, for processes of their own and for this one.

A CUDA build without a driver, as pip gives it on Linux, says ``cuda`` when asked what it is for, None when asked what
is there, and raises at the first call to the device. An NPU plugin without a device does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NEEDS_DEVICE = (
    "current_device_index",
    "current_stream",
    "empty_cache",
    "get_memory_info",
    "max_memory_allocated",
    "memory_allocated",
    "reset_peak_memory_stats",
    "set_device_index",
    "set_stream",
    "synchronize",
)


def pretend(built_for: str, *, devices: int = 0, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process's torch be a build for ``built_for`` on a machine with so many devices.

    Args:
        patch: ``monkeypatch.setattr`` in a test; the default lasts as long as the process.
    """
    there = torch.device(built_for)

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return there if devices or not check_available else None

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")

    patch(torch.accelerator, "current_accelerator", current_accelerator)
    patch(torch.accelerator, "is_available", lambda: devices > 0)
    patch(torch.accelerator, "device_count", lambda: devices)
    for name in NEEDS_DEVICE:
        patch(torch.accelerator, name, fail)


def site_folder(folder: Path, built_for: str, *, devices: int = 0) -> Path:
    """A folder for PYTHONPATH that makes every Python process below it `pretend`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"from other_builds import pretend\npretend({built_for!r}, devices={devices})\n",
        encoding="utf-8",
    )
    return folder
