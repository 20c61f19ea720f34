"""Where a step's time goes, without making the host wait for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Adds up the time of named phases over a window of steps.

    On an accelerator a phase is timed by two events on the current stream, read when the window is closed (by then the
    host waits for the device anyway, to log the loss); on the CPU by the clock. Waiting for data is always host time.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._device = device
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Time a block; ``host``: by the clock also on an accelerator."""
        if self._on_device and not host:
            begin, end = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def close(self) -> tuple[float, dict[str, float]]:
        """End the window and begin the next.

        Returns:
            wall seconds of the window, and seconds per phase.
        """
        if self._events:
            self._events[-1][2].synchronize()
            for name, begin, end in self._events:
                self._seconds[name] += begin.elapsed_time(end) / 1e3
        now = time.perf_counter()
        wall, seconds = now - self._started, dict(self._seconds)
        self._started, self._seconds, self._events = now, defaultdict(float), []
        return wall, seconds
