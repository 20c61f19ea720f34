"""A fault of a value is put to its line by the path that the error carries; its words are for people only."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
from cfg_helpers import CONTAINER, environment, line_of, write
from pydantic import model_validator

from mm_checkpoint.errors import FieldError as SourceFieldError
from mm_parallel import FieldError as PlanFieldError
from mm_trainer.config import load_config
from mm_trainer.config.yaml.diagnose import from_value_error, validate
from mm_trainer.contracts import Options
from mm_trainer.errors import ConfigError, FieldError, MissingField

# Words that name another field, as an error might that quotes one.
MISLEADING = "training.lr: model = 3 × data: is required and missing"


@pytest.mark.parametrize(
    "error",
    [
        PlanFieldError("training.seed", MISLEADING, path=("fsdp_plan", "apply_modules", 1)),
        SourceFieldError(("fsdp_plan", "apply_modules", 1), MISLEADING),
        FieldError(("fsdp_plan", "apply_modules", 1), MISLEADING),
    ],
    ids=lambda error: type(error).__module__,
)
def test_the_path_decides_not_the_words(tmp_path: Path, error: ValueError) -> None:
    text = CONTAINER.replace('["encoder", "predictor.blocks.{*}"]', '\n      - encoder\n      - "predictor.blocks.{*}"')
    document = load_config(write(tmp_path, text), environment=environment(tmp_path)).document
    found = from_value_error(document, error, ("parallel",))
    assert (found.key, found.line) == ("parallel.fsdp_plan.apply_modules.1", line_of(text, '- "predictor.blocks'))
    assert found.message == MISLEADING


def test_an_error_without_a_path_belongs_to_what_was_checked(tmp_path: Path) -> None:
    document = load_config(write(tmp_path, CONTAINER), environment=environment(tmp_path)).document
    found = from_value_error(document, ValueError(MISLEADING), ("parallel", "fsdp_plan"))
    assert (found.key, found.message) == ("parallel.fsdp_plan", MISLEADING)


class PluginOptions(Options):
    """As a plugin writes them: a rule over two fields, and one that asks for a third."""

    low: int = 0
    high: int = 1
    tables: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high < self.low:
            raise FieldError("high", "goes below low")
        if self.low and not self.tables:
            raise MissingField("tables")
        return self


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"low": 2, "high": 1}, "model.high", "goes below low"),
        ({"low": 1}, "model.tables", "is required and missing"),
    ],
)
def test_a_plugins_rule_over_several_fields_names_one(tmp_path: Path, values: dict, key: str, said: str) -> None:
    document = load_config(write(tmp_path, CONTAINER), environment=environment(tmp_path)).document
    with pytest.raises(ConfigError, match=said) as caught:
        validate(PluginOptions, values, document, ("model",))
    assert caught.value.key == key
