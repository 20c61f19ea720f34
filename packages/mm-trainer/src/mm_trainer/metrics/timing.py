"""Where a step's time goes, without making the host wait for the device.

[Note: step time] Every moment between two log lines belongs to one phase at most, so the phases and the rest add up to
the wall time. On an accelerator the moments are events on the current stream, read when the window is closed (the host
waits for the device then anyway, to log the loss). So a phase is charged for what it costs the *stream*: data that are
there before the device is cost nothing, however long the host took to fetch them. On the CPU, moments are read off the
clock. Collectives of the model (FSDP2, context parallelism) count in the phase that issues them: a rank that is late
shows in the others' forward or backward first.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

Moment = float | torch.Event


class PhaseTimer:
    """Adds up the time of named phases over a window of steps; see [Note: step time].

    Phases nest, and an inner one isn't counted in the outer.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases: list[str | None] = [None]
        self._moments: list[tuple[str | None, Moment]] = []  # which phase ends there, and when
        self._mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge a block to ``name``."""
        self._mark()
        self._phases.append(name)
        try:
            yield
        finally:
            self._mark()
            self._phases.pop()

    def restart(self) -> None:
        """Begin a window here; what was timed before is dropped."""
        self._moments.clear()
        self._mark()

    def _mark(self) -> None:
        moment: Moment = time.perf_counter()
        if self._device.type != "cpu":
            moment = torch.Event(self._device.type, enable_timing=True)
            moment.record()
        self._moments.append((self._phases[-1], moment))

    def close(self) -> tuple[float, dict[str, float]]:
        """End the window and begin the next.

        Returns:
            wall seconds of the window, and seconds per phase; what is missing there was in no phase.
        """
        self._mark()
        first, last = self._moments[0][1], self._moments[-1][1]
        if isinstance(last, torch.Event):
            last.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, begin), (name, end) in pairwise(self._moments):
            if name is not None:
                seconds[name] += _elapsed(begin, end)
        self._moments = self._moments[-1:]
        return _elapsed(first, last), dict(seconds)


def _elapsed(begin: Moment, end: Moment) -> float:
    """Seconds between two moments of one kind."""
    if isinstance(begin, torch.Event):
        assert isinstance(end, torch.Event)
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - begin
