"""The shipped recipes pass the same checks as ``mm-trainer check``, for the devices they are written for."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from mm_trainer.commands.prepare import prepare
from mm_trainer.config import load_config
from mm_trainer.errors import ConfigError

RECIPES = sorted(Path(str(resources.files("mm_models_wan.recipes"))).glob("*x.yaml"))
BILLIONS = {"t2v_a14b": 14.288, "i2v_a14b": 14.289, "t2v_5b": 5.000, "ti2v_5b": 5.000}


def passes(recipe: Path, devices: int) -> None:
    checked = prepare(load_config(str(recipe), []), devices, require_files=False)
    assert checked.structure is not None, "shapes come from the named architectures"
    trained = checked.structure.trainable
    assert set(trained) == ({"predictor", "predictor_2"} if "_both_" in recipe.stem else {"predictor"})
    expected = next(count for name, count in BILLIONS.items() if recipe.stem.startswith(name))
    for model in trained.values():
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem.endswith("_8x")], ids=lambda r: r.stem)
def test_recipe_for_8_devices_passes_check(recipe: Path) -> None:
    passes(recipe, 8)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.stem.endswith("_64x")], ids=lambda r: r.stem)
def test_recipe_for_64_devices_passes_check(recipe: Path) -> None:
    passes(recipe, 64)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [("null", "give one of buckets and max_pixels"), ("[[7, 11, 13, 14]]", "bucket .* expected")],
)
def test_data_is_checked_where_no_weights_are(monkeypatch: pytest.MonkeyPatch, buckets: str, message: str) -> None:
    """On a laptop: the shapes of this recipe follow from weights, the data set's own rules from nothing."""
    monkeypatch.delenv("WAN", raising=False)
    monkeypatch.delenv("CLIPS", raising=False)
    recipe = "recipe:wan2_2/tiny_t2v"
    checked = prepare(load_config(recipe, []), 2, require_files=False)
    assert checked.structure is None
    with pytest.raises(ConfigError, match=message):
        prepare(load_config(recipe, [f"data.dataset_param.buckets={buckets}"]), 2, require_files=False)
