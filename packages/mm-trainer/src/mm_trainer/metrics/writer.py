"""Where the figures of a run go: files and services, and the terminal of rank 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mm_trainer.metrics.sinks import Sink

log = logging.getLogger(__name__)

ON_TERMINAL = ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "data_time_s", "memory_gib", "skipped_steps")
"""Of a training step's figures, those that fit a line."""


class MetricsWriter:
    """Writes on rank 0, and does nothing where it is not ``enabled``.

    On a terminal there is a progress bar with the time that remains; elsewhere a ``key=value`` line per log step.

    Args:
        sinks: what else takes the figures; closed with the writer.
        total_steps: length of the run.
        first_step: steps that are already done.
        enabled: True on rank 0.
    """

    def __init__(
        self, sinks: Sequence[Sink] = (), *, total_steps: int = 0, first_step: int = 0, enabled: bool = True
    ) -> None:
        self._sinks = list(sinks)
        self._enabled = enabled
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if enabled and console.is_terminal:
            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, figures="")
            self._progress.start()

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of a step; plain numbers, since the caller decides when to wait for the device."""
        if not self._enabled:
            return
        for sink in self._sinks:
            sink.write(kind, step, figures)
        shown = {k: v for k, v in figures.items() if kind != "train" or k in ON_TERMINAL}
        text = " ".join(f"{name}={value:.4g}" for name, value in shown.items())
        if self._progress is None:
            log.info("%s step=%d %s", kind, step, text)
        elif kind == "train":
            self._progress.update(self._task, completed=step, figures=text)
        else:
            self._progress.console.print(f"{kind} step={step} {text}", highlight=False)

    def close(self) -> None:
        """Stop the bar and close the sinks; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
        for sink in self._sinks:
            sink.close()
        self._progress, self._sinks = None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
