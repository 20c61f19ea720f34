"""The architecture's rules, held statically: who may import whom, and what every distribution declares."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "mm_checkpoint": ROOT / "packages/mm-checkpoint",
    "mm_parallel": ROOT / "packages/mm-parallel",
    "mm_trainer": ROOT / "packages/mm-trainer",
    "mm_models_wan": ROOT / "packages/mm-models-wan",
}
MAY_IMPORT = {
    "mm_checkpoint": set(),
    "mm_parallel": set(),
    "mm_trainer": {"mm_checkpoint", "mm_parallel"},
    "mm_models_wan": {"mm_checkpoint", "mm_parallel", "mm_trainer"},
}
# What is imported under another name than it is installed by.
DISTRIBUTION = {"yaml": "pyyaml", "PIL": "pillow", "pydantic_core": "pydantic"}
MODEL_NAMES = re.compile(r"(?<![a-z])(wan|wan2|umt5|ltx|ltx2|hunyuan|cogvideo)(?![a-z])", re.IGNORECASE)


def sources(package: str) -> list[Path]:
    return sorted((PACKAGES[package] / "src" / package).rglob("*.py"))


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """First components of everything the file imports, inside functions too unless told otherwise."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def declared(package: str) -> dict[str, str]:
    """Required distribution → its whole requirement, extras included."""
    project = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [r for group in project.get("optional-dependencies", {}).values() for r in group]
    requirements = [*project["dependencies"], *extras]
    return {re.split(r"[\[<>=!~; ]", r, maxsplit=1)[0].lower().replace("_", "-"): r for r in requirements}


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_downwards_only(package: str) -> None:
    for path in sources(package):
        upwards = {name for name in imports(path) if name.startswith("mm_")} - MAY_IMPORT[package] - {package}
        assert not upwards, f"{path.relative_to(ROOT)} imports {upwards}"


@pytest.mark.parametrize("package", ["mm_checkpoint", "mm_parallel", "mm_trainer"])
def test_no_model_is_named_outside_its_own_package(package: str) -> None:
    for path in sources(package):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not MODEL_NAMES.search(line), f"{path.relative_to(ROOT)}:{number} names a model: {line.strip()}"


# What only some model families have, whatever their names are: experts of a noise range, image-to-video tasks, their
# conditioning. ("Expert-parallel" is a layout of ranks.)
MODEL_CONCEPTS = re.compile(
    r"(?<![a-z])(vace|t2v|i2v|ti2v|(high|low)[-_ ]noise|guidance_(low|high|2)|transformer_2|experts?(?!-parallel))"
    r"(?![a-z])",
    re.IGNORECASE,
)


@pytest.mark.parametrize("package", ["mm_checkpoint", "mm_parallel", "mm_trainer"])
def test_no_model_familys_concept_is_known_outside_its_own_package(package: str) -> None:
    for path in sources(package):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not MODEL_CONCEPTS.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_private_module_of_a_sibling_is_imported(package: str) -> None:
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                own = node.module.split(".")[0] == package
                private = [part for part in node.module.split(".")[1:] if re.match("_[a-z]", part)]
                assert own or not private, f"{path.relative_to(ROOT)} imports {node.module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_direct_import_is_a_declared_dependency(package: str) -> None:
    known = set(declared(package))
    for path in sources(package):
        for name in imports(path) - set(sys.stdlib_module_names) - {package}:
            distribution = DISTRIBUTION.get(name, name).lower().replace("_", "-")
            assert distribution in known, f"{path.relative_to(ROOT)} imports {name}, which {package} doesn't require"


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_required_by_range(package: str) -> None:
    siblings = {d: r for d, r in declared(package).items() if d.startswith("mm-")}
    assert set(siblings) == {name.replace("_", "-") for name in MAY_IMPORT[package]}
    for requirement in siblings.values():
        assert re.search(r">=[\d.]+,<[\d.]+$", requirement), f"{requirement} is no range"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_accelerator_plugin_is_imported_at_module_level(package: str) -> None:
    for path in sources(package):
        assert "torch_npu" not in imports(path, top_level_only=True), path


@pytest.mark.parametrize("package", PACKAGES)
def test_every_distribution_is_complete(package: str) -> None:
    folder = PACKAGES[package]
    for name in ("README.md", "CHANGELOG.md", "LICENSE", f"src/{package}/py.typed", f"src/{package}/__about__.py"):
        assert (folder / name).is_file(), f"{folder.name} lacks {name}"
    assert importlib.metadata.version(folder.name) in (folder / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_imports(package: str) -> None:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        getattr(module, name)


@pytest.mark.parametrize("module", ["mm_checkpoint", "mm_parallel", "mm_trainer", "mm_trainer.config", "mm_models_wan"])
def test_importing_a_package_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
