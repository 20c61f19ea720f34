"""Looking inside a few steps: profiler traces, allocator snapshots, and what each sub-model holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_parallel import accelerator
from mm_trainer.config.sections.training import MemoryProfileConfig, ProfileConfig, WindowConfig
from mm_trainer.optim.optimizers import NamedOptimizer
from mm_trainer.optim.shards import local

log = logging.getLogger(__name__)


class ProfileWindows:
    """Starts and stops the recordings that ``tools`` asks for: `before` and `after` every step, `close` at the end.

    Args:
        profile, memory: the two windows.
        folder: the run's folder, for windows that name none.
        rank: this rank.
        sub_models, optimizers: whose bytes the memory window lists.
    """

    def __init__(
        self,
        profile: ProfileConfig,
        memory: MemoryProfileConfig,
        *,
        folder: Path,
        rank: int,
        sub_models: Mapping[str, nn.Module],
        optimizers: Mapping[str, NamedOptimizer],
    ) -> None:
        self._profile, self._memory = profile, memory
        self._folder, self._rank = folder, rank
        self._sub_models, self._optimizers = sub_models, optimizers
        self._profiler: Any = None
        self._memory_open = False
        self._device = accelerator()

    def before(self, step: int) -> None:
        """Start what begins with ``step``, counted from 1."""
        if self._starts(self._profile, step):
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        if self._starts(self._memory, step):
            self._memory_open = True
            if self._device is not None:
                torch.get_device_module(self._device).memory._record_memory_history(max_entries=100_000)

    def after(self, step: int) -> None:
        """Stop and write what ends with ``step``."""
        if step >= self._profile.end_step:
            self._end_profile(step)
        if step >= self._memory.end_step:
            self._end_memory(step)

    def close(self, step: int) -> None:
        """Stop and write what is still open: the run has ended after ``step`` steps. (A profiler that nobody stops
        takes the process down at its exit.)"""
        self._end_profile(step)
        self._end_memory(step)

    def _end_profile(self, step: int) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = self._path(self._profile, "profiling") / f"rank{self._rank}_step{step}.json"
        profiler.export_chrome_trace(str(path))
        log.info("wrote the profile of steps %d to %d: %s", self._profile.start_step, step, path)

    def _end_memory(self, step: int) -> None:
        if not self._memory_open:
            return
        self._memory_open = False
        held = {"step": step, "bytes": held_bytes(self._sub_models, self._optimizers)}
        path = self._path(self._memory, "memory") / f"rank{self._rank}_step{step}.json"
        path.write_text(json.dumps(held, indent=2), encoding="utf-8")
        if self._device is not None:
            module = torch.get_device_module(self._device)
            module.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            module.memory._record_memory_history(enabled=None)
        log.info("wrote what the sub-models hold: %s", path)

    def _starts(self, window: WindowConfig, step: int) -> bool:
        return window.enable and self._rank in window.ranks and step == window.start_step

    def _path(self, window: WindowConfig, default: str) -> Path:
        path = Path(window.save_path) if window.save_path is not None else self._folder / default
        path.mkdir(parents=True, exist_ok=True)
        return path


def held_bytes(
    sub_models: Mapping[str, nn.Module], optimizers: Mapping[str, NamedOptimizer]
) -> dict[str, dict[str, int]]:
    """Bytes on this rank per sub-model: parameters, gradients, buffers, optimizer state."""
    table = {}
    for name, model in sub_models.items():
        parameters = list(model.parameters())
        table[name or "model"] = {
            "parameters": sum(map(_bytes, parameters)),
            "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
            "buffers": sum(map(_bytes, model.buffers())),
            "optimizer": sum(map(_bytes, optimizers[name].state().values())) if name in optimizers else 0,
        }
    return table


def _bytes(tensor: Tensor) -> int:
    return local(tensor).nbytes
