"""The package as others see it: imports, entry points, recipes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import resources
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import mm_models_wan
from mm_checkpoint import KeyMap
from mm_trainer.contracts import BaseModel, ClipProcessor, GenerativePipeline, ModelContainer


def test_public_names() -> None:
    assert mm_models_wan.__all__ == [
        "SampleRequest",
        "UMT5TextEncoder",
        "WAN2_2",
        "Wan22Container",
        "Wan22Options",
        "WanArchitecture",
        "WanPipeline",
        "WanPredictor",
        "WanSampler",
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
        "import sys, mm_models_wan, mm_models_wan.weights.architecture, mm_models_wan.recipes; "
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def declared_entry_points() -> dict[str, dict[str, str]]:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return project["entry-points"]


def test_entry_points_lead_to_what_they_say() -> None:
    kinds = {
        "mm_trainer.models": BaseModel,
        "mm_trainer.containers": ModelContainer,
        "mm_trainer.pipelines": GenerativePipeline,
    }
    declared = declared_entry_points()
    assert declared.keys() == {
        *kinds,
        "mm_trainer.recipes",
        "mm_trainer.clip_processors",
        "mm_checkpoint.key_maps",
    }
    for name, value in declared["mm_trainer.clip_processors"].items():
        assert isinstance(EntryPoint(name, value, "mm_trainer.clip_processors").load()(), ClipProcessor), name
    for group, kind in kinds.items():
        for name, value in declared[group].items():
            assert issubclass(EntryPoint(name, value, group).load(), kind), name
    for name, value in declared["mm_checkpoint.key_maps"].items():
        key_map = EntryPoint(name, value, "mm_checkpoint.key_maps").load()
        assert isinstance(key_map, KeyMap)
        assert key_map.name == name


RECIPES = Path(str(resources.files("mm_models_wan.recipes")))


def test_every_recipe_file_is_registered_and_says_what_it_needs() -> None:
    registered = declared_entry_points()["mm_trainer.recipes"]
    files = sorted(file.name for file in RECIPES.glob("*.yaml"))
    assert registered == {f"wan2_2/{file.removesuffix('.yaml')}": f"mm_models_wan.recipes:{file}" for file in files}
    for file in files:
        text = (RECIPES / file).read_text()
        assert "# Needs:" in text.split("parallel:")[0], file
