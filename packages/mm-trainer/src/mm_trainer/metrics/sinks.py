"""Places that figures are written to; each is one small class."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from mm_trainer.config.sections.training import LoggingConfig
from mm_trainer.errors import ConfigError


class Sink(Protocol):
    """Takes the figures of a step; plain finite or non-finite numbers."""

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """``logs/metrics.jsonl``: one object a line: ``kind``, ``step``, ``time`` (s since the epoch) and the figures.

    Numbers that aren't finite are written as null, so that every line is JSON.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._stream = (folder / "logs" / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._stream.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **finite}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Event files in ``tensorboard/``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # heavy, and wanted on one rank only

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A service with wandb's calls (``init``, ``log``, ``finish``): wandb itself, or trackio.

    Args:
        module: its name; also the name of the extra that installs it.
        settings: passed to ``init`` (project, name, …).
        folder: of the run, noted there.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], folder: Path) -> None:
        try:
            self._module = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{module} isn't installed: pip install 'mm-trainer[{module}]'", key=f"tools.logging.{module}"
            ) from error
        except ImportError as error:  # it is there, and doesn't suit what else is
            raise ConfigError(
                f"{module} can't be imported ({error}): pip install --upgrade 'mm-trainer[{module}]'",
                key=f"tools.logging.{module}",
            ) from error
        given = {name: value for name, value in settings.items() if value is not None}
        self._module.init(**given, config={"folder": str(folder)})

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self._module.log({f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._module.finish()


def open_sinks(folder: Path, config: LoggingConfig) -> list[Sink]:
    """The sinks that ``tools.logging`` asks for; JSON lines always.

    Raises:
        ConfigError: one that isn't installed or can't be imported.
    """
    with ExitStack() as opened:
        sinks: list[Sink] = []

        def add(sink: Sink) -> None:
            sinks.append(sink)
            opened.callback(sink.close)

        add(JsonLines(folder))
        if config.tensorboard:
            add(TensorBoard(folder))
        for name in ("wandb", "trackio"):
            settings = getattr(config, name)
            if settings is not None:
                add(Tracker(name, settings.model_dump(), folder))
        opened.pop_all()  # all of them work, so closing is the caller's business
    return sinks
