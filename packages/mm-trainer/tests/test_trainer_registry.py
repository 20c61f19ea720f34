"""Plugins: what is installed, names claimed twice, targets that fail, decorators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mm_trainer import registry
from mm_trainer.errors import PluginError


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path in which tests lay down installed distributions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


def install(folder: Path, name: str, entry_points: str, **modules: str) -> None:
    """A distribution as pip leaves it: metadata and modules."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


MODEL = """
from mm_trainer.contracts import BaseModel
class Mine(BaseModel): ...
class Other: ...
"""


def test_built_ins_enter_by_the_same_door() -> None:
    (video,) = registry.installed(registry.DATASETS)["video"]
    assert (video.distribution, video.target) == ("mm-trainer", "mm_trainer.data.video.dataset:VideoDataset")
    assert registry.load_dataset_factory("video").__name__ == "VideoDataset"


def test_a_plugin_is_listed_without_being_imported(distributions: Path) -> None:
    install(distributions, "broken-dist", "[mm_trainer.models]\nbroken = reg_broken:Model\n", reg_broken="1/0")
    assert [str(p) for p in registry.installed(registry.MODELS)["broken"]] == ["broken-dist (reg_broken:Model)"]
    assert "reg_broken" not in sys.modules


def test_a_target_that_fails_to_import_is_named_with_its_distribution_and_cause(distributions: Path) -> None:
    install(distributions, "broken-dist", "[mm_trainer.models]\nbroken = reg_broken2:Model\n", reg_broken2="1/0")
    with pytest.raises(PluginError, match="reg_broken2:Model of the distribution broken-dist .*ZeroDivisionError") as c:
        registry.load_model("broken")
    assert isinstance(c.value.__cause__, ZeroDivisionError)


def test_a_target_that_isn_t_there(distributions: Path) -> None:
    install(distributions, "empty-dist", "[mm_trainer.models]\nempty = reg_empty:Model\n", reg_empty="")
    with pytest.raises(PluginError, match="empty-dist .*AttributeError"):
        registry.load_model("empty")


def test_an_unknown_name_lists_what_is_installed() -> None:
    with pytest.raises(PluginError, match=r"no 'vidoe' in the group mm_trainer.datasets; did you mean 'video'\?") as c:
        registry.load_dataset_factory("vidoe")
    assert "installed: " in str(c.value)
    assert "latents" in str(c.value)


def test_a_name_claimed_twice_raises_when_used(distributions: Path) -> None:
    for name in ("dist-a", "dist-b"):
        module = name.replace("-", "_")
        install(distributions, name, f"[mm_trainer.models]\ntwice = {module}:Mine\n", **{module: MODEL})
    assert len(registry.installed(registry.MODELS)["twice"]) == 2
    with pytest.raises(PluginError, match=r"claimed by 2 providers: dist-a \(dist_a:Mine\), dist-b \(dist_b:Mine\)"):
        registry.load_model("twice")


def test_one_distribution_found_twice_is_one_provider(distributions: Path) -> None:
    """An editable install leaves metadata in two places, spelt differently."""
    install(distributions, "same-dist", "[mm_trainer.models]\nsame = reg_same:Mine\n", reg_same=MODEL)
    second = distributions / "Same_Dist-1.0.egg-info"
    second.mkdir()
    (second / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Same_Dist\nVersion: 1.0\n")
    (second / "entry_points.txt").write_text("[mm_trainer.models]\nsame = reg_same:Mine\n")
    assert registry.load_model("same").__name__ == "Mine"


def test_a_target_of_the_wrong_kind(distributions: Path) -> None:
    install(distributions, "wrong-dist", "[mm_trainer.models]\nwrong = reg_wrong:Other\n", reg_wrong=MODEL)
    with pytest.raises(PluginError, match="wrong-dist .* is not a subclass of BaseModel"):
        registry.load_model("wrong")


def test_decorators_register_code_that_isn_t_packaged(distributions: Path) -> None:
    (distributions / "reg_decorated.py").write_text(
        "from mm_trainer.registry import register_model\n"
        + MODEL.replace("class Mine", "@register_model('decorated_here')\nclass Mine")
    )
    registry.import_plugin("reg_decorated")
    assert registry.load_model("decorated_here").__name__ == "Mine"
    assert registry.installed(registry.MODELS)["decorated_here"][0].distribution == "module reg_decorated"


def test_a_decorator_and_a_distribution_that_claim_one_name(distributions: Path) -> None:
    install(distributions, "claimed-dist", "[mm_trainer.models]\nclaimed = reg_claimed:Mine\n", reg_claimed=MODEL)
    registry.register_model("claimed")(type("Mine", (), {"__module__": "elsewhere"}))
    with pytest.raises(PluginError, match="claimed-dist .*module elsewhere"):
        registry.load_model("claimed")


def test_a_plugin_module_that_fails(distributions: Path) -> None:
    (distributions / "reg_failing.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(PluginError, match="'reg_failing' can't be imported: RuntimeError: no licence"):
        registry.import_plugin("reg_failing")


def test_recipes_are_package_resources(distributions: Path) -> None:
    install(distributions, "recipe-dist", "[mm_trainer.recipes]\nmine/first = reg_recipes:first.yaml\n")
    (distributions / "reg_recipes").mkdir()
    (distributions / "reg_recipes" / "__init__.py").write_text("")
    (distributions / "reg_recipes" / "first.yaml").write_text("training: {lr: 1}\n")
    assert "mine/first" in registry.recipes()
    assert registry.read_recipe("mine/first") == "training: {lr: 1}\n"
    (distributions / "reg_recipes" / "first.yaml").unlink()
    with pytest.raises(PluginError, match="'mine/first' of recipe-dist .* can't be read"):
        registry.read_recipe("mine/first")


def test_importing_the_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mm_trainer import registry\nfor group in registry.GROUPS: registry.installed(group)\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'mm_trainer.data') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
