"""Lower bounds in the metadata: all of them are stated, and the environment `lowest` runs exactly them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / ".ci/constraints-lowest.txt"
PROJECTS = [*sorted((ROOT / "packages").glob("*/pyproject.toml")), ROOT / "integration_tests/toy-plugin/pyproject.toml"]


def requirements(path: Path) -> list[Requirement]:
    """What a project needs to be built, to run and for its extras, siblings left out."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    project = content["project"]
    extras = [line for group in project.get("optional-dependencies", {}).values() for line in group]
    lines = [*content["build-system"]["requires"], *project["dependencies"], *extras]
    return [r for r in map(Requirement, lines) if not r.name.startswith("mm-")]


def lower_bound(requirement: Requirement) -> Version:
    bounds = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==", "~=")]
    assert len(bounds) == 1, f"`{requirement}` doesn't have one lower bound"
    return bounds[0]


def pinned() -> dict[str, Version]:
    """Distribution → the version in the constraints file."""
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(p.name): Version(str(p.specifier).removeprefix("==")) for p in pins}


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_the_constraints_pin_every_lower_bound(path: Path) -> None:
    pins = pinned()
    stated = {canonicalize_name(r.name): lower_bound(r) for r in requirements(path)}
    assert stated
    assert stated == {name: pins.get(name) for name in stated}


def test_the_constraints_pin_nothing_else() -> None:
    assert set(pinned()) == {canonicalize_name(r.name) for path in PROJECTS for r in requirements(path)}
