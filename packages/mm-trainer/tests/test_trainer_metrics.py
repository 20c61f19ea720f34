"""What is written where, with stand-ins for the services that aren't installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_trainer.config.sections.training import LoggingConfig
from mm_trainer.errors import ConfigError
from mm_trainer.metrics.sinks import JsonLines, open_sinks
from mm_trainer.metrics.writer import MetricsWriter


def test_every_line_is_json_also_with_bad_numbers(tmp_path: Path) -> None:
    with MetricsWriter([JsonLines(tmp_path)], total_steps=2) as metrics:
        metrics.write("train", 1, {"loss": float("nan"), "lr": 0.5})
        metrics.write("validation", 1, {"loss": 2.0})
    lines = (tmp_path / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["kind"], r["step"], r["loss"]) for r in records] == [("train", 1, None), ("validation", 1, 2.0)]
    assert records[0]["lr"] == 0.5


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(open_sinks(tmp_path, LoggingConfig()), total_steps=2) as metrics:
        metrics.write("train", 1, {"loss": 3.0})
        metrics.write("train", 2, {"loss": 2.5})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_is_started_fed_and_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    calls: list[tuple[str, Any]] = []
    stand_in = SimpleNamespace(
        init=lambda **settings: calls.append(("init", settings["project"])),
        log=lambda figures, step: calls.append(("log", (figures, step))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, service, stand_in)
    config = LoggingConfig.model_validate({"tensorboard": False, service: {"project": "films"}})
    with MetricsWriter(open_sinks(tmp_path, config), total_steps=1) as metrics:
        metrics.write("train", 1, {"loss": 3.0})
    assert calls == [("init", "films"), ("log", ({"train/loss": 3.0}, 1)), ("finish", None)]


def test_a_service_that_is_not_installed_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = LoggingConfig.model_validate({"wandb": {"project": "films"}})
    with pytest.raises(
        ConfigError, match=r"tools.logging.wandb: wandb isn't installed: pip install 'mm-trainer\[wandb\]'"
    ):
        open_sinks(tmp_path, config)


def test_a_service_that_does_not_suit_another_package_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text("from json import NoSuchName\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    config = LoggingConfig.model_validate({"trackio": {"project": "films"}})
    with pytest.raises(ConfigError, match=r"tools.logging.trackio: trackio can't be imported \(.*NoSuchName.*upgrade"):
        open_sinks(tmp_path, config)


# Run in a process of its own: the services leave threads behind. Only the environment `lowest` has them installed.
FEED = """
import sys
from pathlib import Path
from mm_trainer.config.sections.training import LoggingConfig
from mm_trainer.metrics.sinks import open_sinks
config = LoggingConfig.model_validate({"tensorboard": False, sys.argv[1]: {"project": "films"}})
for sink in open_sinks(Path.cwd(), config):
    sink.write("train", 1, {"loss": 3.25})
    sink.close()
"""


@pytest.mark.parametrize(("service", "pattern"), [("wandb", "**/*.wandb"), ("trackio", "**/films.db")])
def test_the_real_service_takes_what_it_is_fed(tmp_path: Path, service: str, pattern: str) -> None:
    if importlib.util.find_spec(service) is None:
        pytest.skip(f"{service} isn't installed")
    local = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "kept")}
    subprocess.run([sys.executable, "-c", FEED, service], cwd=tmp_path, env=os.environ | local, check=True, timeout=120)
    (written,) = tmp_path.glob(pattern)
    assert b"train/loss" in written.read_bytes()


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter([JsonLines(tmp_path)], total_steps=1, enabled=False) as metrics:
        metrics.write("train", 1, {"loss": 3.0})
    assert (tmp_path / "logs" / "metrics.jsonl").read_text(encoding="utf-8") == ""
    assert not caplog.records
