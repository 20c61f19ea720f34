"""What version 0.1 wrote is read by today's code; `fixtures/written_by_0.1` says how it was made."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

WRITTEN = Path(__file__).parent / "fixtures" / "written_by_0.1"
CONFIG = WRITTEN / "run" / "config.resolved.yaml"
GONE = {"training.save_format", *(f"model.models.{n}.skip_to_device" for n in ("ae", "text_encoder", "predictor"))}
"""Keys of 0.1 that there are no more; they are read over where they say what happens anyway."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "old"))


def moved(old: Path, *more: str) -> list[str]:
    places = {
        "model.models.text_encoder.from_pretrained": old / "text_encoder",
        "data.cache": old / "cache",
        "training.save": old / "run",
    }
    return [*(f"{key}={path}" for key, path in places.items()), *more]


def make(rank: int, world_size: int, overrides: list[str], steps: int) -> dict[str, Any]:
    """Make the engine, look at it, and train if there are steps left."""
    from mm_parallel import ParallelMesh
    from mm_trainer.commands.prepare import Prepared
    from mm_trainer.commands.train import make_engine
    from mm_trainer.config import bind, load_config, resolve

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mm_trainer").addHandler(handler)
    config = resolve(load_config(str(CONFIG), overrides), world_size)
    engine = make_engine(Prepared(config, bind(config)), ParallelMesh.build(config.mesh, device_type="cpu"))
    weights = {f"model.{name}": value.tolist() for name, value in engine.model.state_dict().items()}
    with engine.services.metrics:
        if steps:
            engine.train()
    unused = [
        name for name, model in engine.model.get_sub_models().items() if any(p.is_meta for p in model.parameters())
    ]
    return {"weights": weights, "said": said, "unused": unused}


def test_a_run_goes_on_from_its_checkpoint_and_its_cache(run_ranks, old: Path) -> None:
    overrides = moved(old, "training.load=auto", "training.train_iters=3")
    result = run_ranks(make, 1, overrides, 1)[0]
    expected = json.loads((WRITTEN / "weights.json").read_text())
    assert len(expected) > 10
    assert {name: result["weights"].get(name) for name in expected} == expected
    assert result["unused"] == ["text_encoder"], "conditions came from the cache"
    assert any("was made by version 0.1, which compared 1024 places" in text for text in result["said"])
    records = [json.loads(line) for line in (old / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [3]


def test_its_cache_is_still_compared_with_the_weights(run_ranks, old: Path) -> None:
    file = old / "text_encoder" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match=r"stale.*encoders\.text_encoder\.weights"):
        run_ranks(make, 1, moved(old), 0)


def test_its_resolved_configuration_means_the_same(old: Path) -> None:
    """Every value that it states, however defaults have changed since."""
    from mm_trainer.config import bind, dump_resolved, load_config, resolve

    stated = flatten(yaml.safe_load(CONFIG.read_text()))
    bound = bind(resolve(load_config(str(CONFIG), moved(old)), 1))
    now = flatten(yaml.safe_load(dump_resolved(bound.config)))
    paths = {"model.models.text_encoder.from_pretrained", "data.cache", "training.save"}
    assert len(stated) > 80
    differing = {key: (value, now.get(key)) for key, value in stated.items() if now.get(key) != value}
    assert differing.keys() - paths == GONE


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
