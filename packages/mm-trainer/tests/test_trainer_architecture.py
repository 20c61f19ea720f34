"""Keys of `architecture`: merged into what the weight folder states, and refused where nobody knows them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_trainer.contracts import BaseModel
from mm_trainer.errors import ConfigError


class Named(BaseModel):
    architectures = {"small": {"num_layers": 2, "width": 8}, "wide": {"num_layers": 2, "width": 64, "heads": 4}}


class Declared(BaseModel):
    @classmethod
    def architecture_fields(cls) -> Collection[str]:
        return ("num_layers", "dropout")


class Silent(BaseModel):
    """Says nothing of its shapes."""


def read(kind: type[BaseModel], architecture: Any, on_disk: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = None if on_disk is None else SimpleNamespace(config=on_disk, path=Path("folder"))
    spec: Any = SimpleNamespace(key="model", name="model", architecture=architecture, weights=weights)
    return kind.read_architecture(spec)


@pytest.mark.parametrize("on_disk", [None, {"num_layers": 2, "width": 8}])
@pytest.mark.parametrize("kind", [Named, Declared])
def test_a_key_that_nobody_knows_is_refused_with_the_nearest(kind: type[BaseModel], on_disk: Any) -> None:
    """It was dropped beside a weight folder, and trained the folder's shapes."""
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no such shape; did you mean num_layers?") as info:
        read(kind, {"num_layer": 3}, on_disk)
    assert info.value.key == "model.architecture.num_layer"


def test_beside_a_folder_a_class_without_fields_knows_those_of_the_folder() -> None:
    with pytest.raises(ConfigError, match="did you mean num_layers?"):
        read(Silent, {"num_layer": 3}, {"num_layers": 2})
    assert read(Silent, {"anything": 1}) == {"anything": 1}


def test_a_key_that_the_folder_leaves_out_is_added() -> None:
    assert read(Declared, {"dropout": 0.1}, {"num_layers": 2}) == {"num_layers": 2, "dropout": 0.1}
    assert read(Named, {"heads": 2}, {"num_layers": 2}) == {"num_layers": 2, "heads": 2}


def test_a_tuple_is_the_list_that_a_file_has() -> None:
    assert read(Declared, {"num_layers": (1, 2)}, {"num_layers": [1, 2]}) == {"num_layers": (1, 2)}


def test_a_name_is_compared_with_the_folder_and_adds_nothing() -> None:
    assert read(Named, "wide", {"num_layers": 2}) == {"num_layers": 2}
    with pytest.raises(ConfigError, match="disagrees with the weight folder folder: num_layers: 2 here, 3 there"):
        read(Named, "wide", {"num_layers": 3})
    with pytest.raises(ConfigError, match="unknown architecture 'huge'; Named knows: small, wide"):
        read(Named, "huge")
