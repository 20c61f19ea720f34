"""YAML with positions: what scalars mean, and what is refused."""

from __future__ import annotations

import math

import pytest
import yaml

from mm_trainer.config.yaml.nodes import Dumper, parse_yaml
from mm_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("-0", 0),
        ("012", "012"),
        ("1:30", "1:30"),
        ("on", "on"),
        ("NO", "NO"),
        ("yes", "yes"),
        ("True", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("'12'", "12"),
        ("!!str 12", "12"),
        ("e5", "e5"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """B092: the traps of YAML 1.1 (text for 1e-4; other values for on, NO, 012, 1:30) are gone."""
    parsed = parse_yaml(f"key: {text}", "f.yaml").value["key"].value
    assert parsed == value
    assert type(parsed) is type(value)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(parse_yaml("key: .nan", "f.yaml").plain()["key"])


def test_nodes_remember_where_they_were_written() -> None:
    root = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - 'y'\n", "f.yaml")
    c = root.value["a"].value["c"]
    assert root.value["a"].value["b"].line == 2
    assert c.line == 3
    assert [item.line for item in c.value] == [4, 5]
    assert [item.quoted for item in c.value] == [False, True]
    assert root.plain() == {"a": {"b": 1, "c": ["x", "y"]}}


def test_anchors_and_merge_keys() -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {x: 5}\nuse: {<<: [*o, *b], y: 3}\nsame: *b\n"
    root = parse_yaml(text, "f.yaml").plain()
    assert root["use"] == {"x": 5, "y": 3}
    assert root["same"] == root["base"]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "given twice, first in line 1"),
        ("a:\n\t- 1\n", 2, "not valid YAML"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("b: 1\na: 'open\nc: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: !!python/object:os.system x\n", 1, "isn't allowed"),
        ("a: !thing {b: 1}\n", 1, "isn't allowed"),
        ("a: 1\n? [x, y]\n: 2\n", 2, "a key must be a plain word"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("a: *nowhere\n", 1, "not valid YAML"),
        ("a: {<<: 3}\n", 1, "merges mappings only"),
    ],
)
def test_refused_with_file_and_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_yaml(text, "f.yaml")
    assert (caught.value.file, caught.value.line) == ("f.yaml", line)


def test_a_control_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_yaml("a: \x07\n", "f.yaml")


@pytest.mark.parametrize("value", ["1e3", "012", "on", "1:30", "true", "~", "", "0o7", "2024-01-02", "a: b", "x", "<<"])
def test_dumped_text_is_read_as_text(value: str) -> None:
    assert parse_yaml(yaml.dump({"key": value}, Dumper=Dumper), "f.yaml").plain() == {"key": value}
