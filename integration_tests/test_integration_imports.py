"""The layout's rules: no circle of imports, none from a lower wing to a higher one, no folder too full to overlook."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each package's wings and single modules, the lowest first: a module imports from its own line or from lines above it.
WINGS: dict[str, list[set[str]]] = {
    "mm_checkpoint": [
        {"__about__", "errors"},
        {"config", "key_map", "_ranks", "_disk"},
        {"_tensors"},
        {"_formats"},
        {"_weights", "_run"},
        {"_tools"},
        {"cli"},
        {"__init__"},
    ],
    "mm_parallel": [
        {"__about__", "errors", "devices"},
        {"patterns"},
        {"config"},
        {"sizes"},
        {"attention"},
        {"mesh"},
        {"activations", "accounting"},
        {"sharding"},
        {"__init__"},
    ],
    "mm_trainer": [
        {"__about__", "errors", "randomness"},
        {"contracts"},
        {"registry"},
        {"config", "pipelines"},
        {"data", "optim"},
        {"metrics"},
        {"engine", "launch"},
        {"commands"},
        {"cli", "testing"},
        {"__init__", "__main__"},
    ],
    "mm_models_wan": [
        {"__about__", "schedule"},
        {"weights", "options"},
        {"modules"},
        {"noise"},
        {"pipeline", "sampling", "vace"},
        {"container", "tiny"},
        {"recipes"},
        {"__init__"},
    ],
}
MOST_FILES_IN_A_FOLDER = 14


def modules(package: str) -> dict[str, Path]:
    """Dotted name → file, of every module."""
    source = ROOT / "packages" / package.replace("_", "-") / "src"
    files = sorted((source / package).rglob("*.py"))
    return {".".join(f.relative_to(source).with_suffix("").parts): f for f in files}


def face(path: Path) -> dict[str, str]:
    """What a package's lazy ``__init__`` offers: name → module below it; empty where it isn't lazy."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the same package that a file imports: inside functions and for types only as well, since a reader
    has to follow those too. What comes through a lazy face comes from its home; the face itself imports nothing."""
    if path.name == "__init__.py" and face(path):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            homes = face(known[f"{node.module}.__init__"]) if f"{node.module}.__init__" in known else {}
            for alias in node.names:
                below = f"{node.module}.{homes.get(alias.name, alias.name)}"
                names.append(below if below in known or f"{below}.__init__" in known else node.module)
        for name in names:
            if name in known:
                yield name
            elif f"{name}.__init__" in known:
                yield f"{name}.__init__"


@pytest.fixture(scope="module", params=WINGS)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def graph(package: str) -> dict[str, set[str]]:
    known = modules(package)
    return {module: set(imported(path, known)) - {module} for module, path in known.items()}


def test_no_module_is_imported_in_a_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' → '.join(error.args[1])}")


def test_no_wing_imports_a_higher_one(package: str, graph: dict[str, set[str]]) -> None:
    height = {wing: number for number, wings in enumerate(WINGS[package]) for wing in wings}
    found = {module.split(".")[1] for module in graph}
    assert found == set(height), f"wings that have no place in the order, or are gone: {found ^ set(height)}"
    for module, targets in graph.items():
        for target in targets:
            own, other = module.split(".")[1], target.split(".")[1]
            if other == "__init__" or own == other:
                continue  # a face is lazy: what counts is the circle test
            assert height[other] < height[own], f"{module} imports {target}: {other} stands beside or above {own}"


def test_no_folder_is_too_full(package: str) -> None:
    folders: dict[Path, int] = {}
    for path in modules(package).values():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    for folder, count in folders.items():
        assert count <= MOST_FILES_IN_A_FOLDER, f"{folder.relative_to(ROOT)} holds {count} modules side by side"


def test_no_lazy_name_is_a_modules_name(package: str) -> None:
    """``from package import name`` gives the submodule once that was imported, whatever the face would say."""
    for path in modules(package).values():
        if path.name == "__init__.py":
            beside = {entry.stem for entry in path.parent.iterdir() if entry.suffix in ("", ".py")}
            clash = face(path).keys() & beside
            assert not clash, f"{path.relative_to(ROOT)} exports {clash}, which are modules there too"
