"""Where the figures of a run go: JSON lines, TensorBoard, and the terminal of rank 0."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes on rank 0 and does nothing elsewhere.

    - ``logs/metrics.jsonl``: one object a line, ``kind`` (``train`` or ``validation``), ``step``, ``time`` (seconds
      since the epoch) and the figures; numbers that aren't finite are written as null, so that every line is JSON.
    - ``tensorboard/``, if asked for.
    - a progress bar on a terminal, ``key=value`` lines elsewhere.

    Args:
        folder: the run's folder.
        total_steps: length of the run.
        first_step: steps that are already done.
        enabled: True on rank 0.
        tensorboard: also write event files.
    """

    def __init__(
        self, folder: Path, *, total_steps: int, first_step: int = 0, enabled: bool, tensorboard: bool = True
    ) -> None:
        self._lines: TextIO | None = None
        self._board: Any = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self.enabled = enabled
        if not enabled:
            return
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "logs" / "metrics.jsonl").open("a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # heavy, and wanted on rank 0 only

            self._board = SummaryWriter(str(folder / "tensorboard"))
        console = Console(stderr=True)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=first_step, figures="")
            self._progress.start()

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of a step; call with plain numbers (the caller decides when to wait for the device)."""
        if not self.enabled or self._lines is None:
            return
        clean = {k: v if math.isfinite(v) else None for k, v in figures.items()}
        record = {"kind": kind, "step": step, "time": time.time(), **clean}
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        if self._board is not None:
            for key, value in figures.items():
                self._board.add_scalar(f"{kind}/{key}", value, step)
        text = " ".join(f"{k}={_short(v)}" for k, v in figures.items())
        if self._progress is not None and self._task is not None:
            if kind == "train":
                self._progress.update(self._task, completed=step, figures=text)
            else:
                self._progress.console.print(f"{kind} step={step} {text}", highlight=False)
        else:
            log.info("%s step=%d %s", kind, step, text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._lines is not None:
            self._lines.close()
        self._progress = self._board = self._lines = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
