"""The package as others see it: imports, entry points, recipes."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from importlib.metadata import entry_points

import pytest
import yaml

import mm_models_wan


def test_public_names() -> None:
    assert mm_models_wan.__all__ == [
        "UMT5TextEncoder",
        "WAN2_2",
        "Wan22Container",
        "Wan22Options",
        "WanArchitecture",
        "WanPipeline",
        "WanPredictor",
        "WanSchedulerOptions",
        "WanVideoVAE",
        "build_schedule",
        "write_tiny_pipeline",
    ]
    for name in mm_models_wan.__all__:
        assert getattr(mm_models_wan, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mm_models_wan.nothing


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, mm_models_wan, mm_models_wan.architecture, mm_models_wan.recipes; "
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_entry_points_lead_to_what_they_say() -> None:
    groups = ("mm_trainer.models", "mm_trainer.containers", "mm_trainer.pipelines", "mm_checkpoint.key_maps")
    found = {
        entry.name: entry.load()
        for group in groups
        for entry in entry_points(group=group)
        if entry.value.startswith("mm_models_wan.")
    }
    assert found == {
        "wan_video_vae": mm_models_wan.WanVideoVAE,
        "UMT5": mm_models_wan.UMT5TextEncoder,
        "wan2_2_predictor": mm_models_wan.WanPredictor,
        "wan2_2_container": mm_models_wan.Wan22Container,
        "wan2_2": mm_models_wan.WAN2_2 if found["wan2_2"] is mm_models_wan.WAN2_2 else mm_models_wan.WanPipeline,
    }


def test_every_recipe_file_is_registered_and_is_yaml() -> None:
    registered = {
        entry.name: entry.value
        for entry in entry_points(group="mm_trainer.recipes")
        if entry.value.startswith("mm_models_wan.")
    }
    files = {f.name for f in resources.files("mm_models_wan.recipes").iterdir() if f.name.endswith(".yaml")}
    assert {value.partition(":")[2] for value in registered.values()} == files
    for name, value in registered.items():
        assert name.startswith("wan2_2/")
        text = resources.files("mm_models_wan.recipes").joinpath(value.partition(":")[2]).read_text()
        assert set(yaml.safe_load(text)) <= {"parallel", "model", "data", "training", "tools", "features"}
        assert text.startswith("#"), "a recipe says what it needs"
