"""The map and the guide for contributors name what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    name: ROOT / "packages" / name.replace("_", "-") / "src"
    for name in ("mm_checkpoint", "mm_parallel", "mm_trainer", "mm_models_wan")
}
PAGES = ["docs/architecture.md", "CONTRIBUTING.md", "README.md"]
FILE = re.compile(r"`([\w./-]+\.(?:py|md|toml|yaml|sh))`")


def named_files(text: str) -> list[str]:
    return FILE.findall(text)


def candidates(name: str, text: str) -> list[Path]:
    """Where a file of that name may be: below the root, in a package, or beside a file that the page names as well."""
    package = name.split("/")[0]
    if package in SOURCES:
        return [SOURCES[package] / name]
    if "/" in name:
        return [ROOT / name]
    folders = [path.parent for other in named_files(text) if "/" in other for path in candidates(other, text)]
    everywhere = [source.parent / name for source in SOURCES.values()]  # such as each package's README
    return [ROOT / name, *(folder / name for folder in folders), *everywhere]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # What a run writes is no file of the checkout.
    names = [name for name in named_files(text) if name not in ("config.resolved.yaml", "my_run.yaml", "__init__.py")]
    lost = [name for name in names if not any(path.is_file() for path in candidates(name, text))]
    assert not lost, f"{page} names files that don't exist: {lost}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (folder / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_hatch_command_is_defined(page: str) -> None:
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    inherited = {*environments["default"]["scripts"], "pytest"}
    known = inherited | {f"{name}:{script}" for name in environments for script in inherited}
    named = set(re.findall(r"hatch run ([a-z][\w:-]*)", (ROOT / page).read_text(encoding="utf-8")))
    assert named <= known, f"{page} names commands that hatch.toml lacks: {named - known}"


def test_the_map_names_every_wing() -> None:
    """A wing that nobody can find on the map was forgotten there."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for package, source in SOURCES.items():
        for folder in (source / package).iterdir():
            if (folder / "__init__.py").is_file() and folder.name != "recipes":
                assert f"`{folder.name}`" in text or f"{package}/{folder.name}/" in text, f"{package}/{folder.name}"
