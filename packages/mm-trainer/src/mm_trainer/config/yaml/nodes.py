"""YAML text → a tree of nodes that remember where they were written.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: ``1e-4`` is a number, ``on`` and ``NO`` are text, and neither
``012`` nor ``1:30`` silently becomes another number. Duplicate keys, tags and several documents are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from mm_trainer.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the root of a document."""

_PREFIX = "tag:yaml.org,2002:"
_MERGE = _PREFIX + "merge"
_RESOLVERS = [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the resolvers above instead of its own."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class declares it this way


class Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would read as something else than text."""


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(
            _PREFIX + _tag, re.compile(f"(?:{_pattern})$"), [character.strip("\0") for character in _first]
        )


@dataclass(frozen=True)
class Node:
    """One value of a document.

    Args:
        value: a scalar, a mapping of text to nodes, or a list of nodes.
        file: where it was written; ``command line`` for an override.
        line: 1-based, or None on the command line. A mapping's value carries the line of its key.
        text: a scalar as it was written, quotes aside.
        quoted: whether a scalar was written in quotes.
    """

    value: Any
    file: str
    line: int | None
    text: str = ""
    quoted: bool = False

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, part: str | int) -> Node | None:
        """The node one step down, or None."""
        if isinstance(self.value, dict):
            found: Node | None = self.value.get(str(part))
            return found
        if isinstance(self.value, list) and str(part).isdigit() and int(part) < len(self.value):
            item: Node = self.value[int(part)]
            return item
        return None


def parse_yaml(text: str, file: str, *, has_lines: bool = True) -> Node:
    """Parse one YAML document.

    Args:
        text: the document.
        file: its name in errors.
        has_lines: False for text that isn't a file, whose line numbers would mean nothing.

    Raises:
        ConfigError: with file and line.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        is_quote = "quoted scalar" in (error.context or "")  # whose end is missing; where it starts is of interest
        mark = error.context_mark if is_quote else error.problem_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark is not None and has_lines else None
        if error.context == "while parsing a flow mapping" and mark is not None:
            is_bare = "${" in text.splitlines()[mark.line]
            said += ' (inside braces, a value with ${…} needs quotes: "${NAME}/folder")' if is_bare else ""
        raise ConfigError(f"not valid YAML: {said}", file=file, line=line) from error
    except yaml.YAMLError as error:  # the reader's: a character that YAML doesn't allow
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", file=file) from error
    if root is None:
        return Node(None, file, 1 if has_lines else None)
    return _Converter(file, has_lines).convert(root)


class _Converter:
    """PyYAML's nodes → ours."""

    def __init__(self, file: str, has_lines: bool) -> None:
        self._file, self._has_lines = file, has_lines
        self._open: list[yaml.Node] = []  # from the root to the node at work: an alias to one of them is a cycle

    def convert(self, node: yaml.Node, line: int | None = None) -> Node:
        at = line if line is not None else self._line(node)
        if any(node is parent for parent in self._open):
            raise ConfigError("an alias that contains itself", file=self._file, line=self._line(node))
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                self._refuse_tag(node, "map")
                return Node(self._mapping(node), self._file, at)
            if isinstance(node, yaml.SequenceNode):
                self._refuse_tag(node, "seq")
                return Node([self.convert(item) for item in node.value], self._file, at)
            assert isinstance(node, yaml.ScalarNode)  # there is no fourth kind
            return Node(self._scalar(node), self._file, at, node.value, quoted=node.style in ("'", '"'))
        finally:
            self._open.pop()

    def _line(self, node: yaml.Node) -> int | None:
        return node.start_mark.line + 1 if self._has_lines else None

    def _refuse_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != _PREFIX + kind:
            raise ConfigError(
                f"the tag {node.tag.replace(_PREFIX, '!!')!r} isn't allowed", file=self._file, line=self._line(node)
            )

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = self._merged(value_node) | merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("a key must be a plain word", file=self._file, line=self._line(key_node))
            key = key_node.value
            if key in own:
                raise ConfigError(
                    f"the key is given twice, first in line {own[key].line}",
                    key=key,
                    file=self._file,
                    line=self._line(key_node),
                )
            own[key] = self.convert(value_node, self._line(key_node))
        return merged | own

    def _merged(self, node: yaml.Node) -> dict[str, Node]:
        """What ``<<: *base`` or ``<<: [*a, *b]`` brings in; the first of several wins."""
        result: dict[str, Node] = {}
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            value = self.convert(item).value
            if not isinstance(value, dict):
                raise ConfigError("`<<` merges mappings only", file=self._file, line=self._line(node))
            result = value | result
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text, kind = node.value, node.tag.removeprefix(_PREFIX)
        match kind:
            case "str" | "merge":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text.replace("_", ""), 0)
            case "float":
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        self._refuse_tag(node, "str")
        raise AssertionError("unreachable")
