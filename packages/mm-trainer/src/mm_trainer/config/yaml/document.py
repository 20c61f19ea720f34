"""A configuration file with what it extends, the overrides of the command line and the environment put in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_trainer.config.environment import Environment
from mm_trainer.config.yaml.nodes import KeyPath, Node, parse_yaml
from mm_trainer.errors import ConfigError, PluginError

RECIPE = "recipe:"
COMMAND_LINE = "command line"
_ALIASES = {"checkpoint_format": "load_format", "hub_backend": "load_format"}
_STAYED = "every sub-model is where its inputs are; `cpu_offload` of its sub-plan keeps its weights on the host"
_RETIRED: dict[tuple[str, ...], tuple[Any, str]] = {
    ("training", "save_format"): ("dcp", "checkpoints are always DCP; other forms come from `mm-checkpoint export`"),
    ("model", "skip_to_device"): (False, _STAYED),
    ("model", "models", "*", "skip_to_device"): (False, _STAYED),
}
"""Path of a key that went → the only value that is still accepted, and what to say to others."""

ReadRecipe = Callable[[str], str]
"""Recipe name → its YAML text."""


@dataclass(frozen=True)
class Undefined:
    """A reference to an environment variable that isn't defined."""

    key: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """The merged tree of one configuration.

    Args:
        root: sections by name.
        environment: what was used to expand references, and the base of relative paths.
        undefined: references that stayed as they were.
    """

    root: Node
    environment: Environment
    undefined: tuple[Undefined, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Sections as plain values; a section with nothing below its name counts as absent."""
        return {key: value for key, value in self.root.plain().items() if value is not None}

    def at(self, path: KeyPath) -> tuple[KeyPath, Node]:
        """The deepest node on ``path``, and where it is."""
        node = self.root
        for depth, part in enumerate(path):
            below = node.child(part)
            if below is None:
                return path[:depth], node
            node = below
        return path, node

    def error(self, message: str, path: KeyPath) -> ConfigError:
        """An error about the value at ``path``, with file and line."""
        _, node = self.at(path)
        return ConfigError(message, key=dotted(path), file=node.file, line=node.line)


def dotted(path: KeyPath) -> str:
    """``("training", "plugin", 0)`` → ``training.plugin.0``."""
    return ".".join(str(part) for part in path)


def split_key(key: str) -> KeyPath:
    """The inverse of `dotted`; list positions stay text, which `Node.child` accepts."""
    return tuple(key.split("."))


def read_document(
    reference: str, overrides: Sequence[str], environment: Environment, read_recipe: ReadRecipe
) -> Document:
    """Read a file or recipe, what it extends, and the overrides.

    Args:
        reference: a path, or ``recipe:NAME``.
        overrides: ``dotted.key=value``, the value in YAML.
        environment: for references in values, and the base of a relative ``reference``.
        read_recipe: looks recipes up.

    Raises:
        ConfigError: unreadable file, bad YAML, a circle of ``extends``, an override that fits nothing.
    """
    root = _Reader(environment, read_recipe).read(reference, base=environment.cwd)
    for override in overrides:
        root = _override(root, override)
    # After the overrides, which may set retired keys and aliases as well.
    root = _complete_mixes(_rename_aliases(_drop_retired(root)))
    undefined: list[Undefined] = []
    # Last, so that a variable which an override replaces need not be defined.
    root = _expand(root, environment, undefined, ())
    return Document(root, environment, tuple(undefined))


class _Reader:
    """Follows ``extends`` from a file to what it builds on."""

    def __init__(self, environment: Environment, read_recipe: ReadRecipe) -> None:
        self._environment, self._read_recipe = environment, read_recipe
        self._chain: list[str] = []

    def read(self, reference: str, *, base: str, named_by: Node | None = None) -> Node:
        """Merged tree of ``reference``; a relative path counts from ``base``."""
        reference, _ = self._environment.expand(reference)
        is_recipe = reference.startswith(RECIPE)
        identity = reference if is_recipe else os.path.normpath(os.path.join(base, reference))
        if identity in self._chain:
            circle = " → ".join([*self._chain, identity])
            raise _at(named_by, f"a circle of files that extend each other: {circle}", "extends")
        text = self._recipe(reference, named_by) if is_recipe else _read_file(identity, named_by)
        shown = reference if is_recipe or named_by is None else identity
        root = parse_yaml(text, shown)
        if not isinstance(root.value, dict):
            what = "the file is empty" if root.value is None else f"a {type(root.value).__name__} at the top level"
            raise ConfigError(f"expected the sections of a configuration, got {what}", file=shown, line=root.line)
        extends = root.value.get("extends")
        # `extends` is spent here; it is no key of the merged configuration.
        own = replace(root, value={key: node for key, node in root.value.items() if key != "extends"})
        if extends is None:
            return own
        if not isinstance(extends.value, str):
            raise _at(extends, "expected one file or recipe:NAME to build on", "extends")
        self._chain.append(identity)
        parent = self.read(extends.value, base=base if is_recipe else os.path.dirname(identity), named_by=extends)
        self._chain.pop()
        return _merge(parent, own)

    def _recipe(self, reference: str, named_by: Node | None) -> str:
        try:
            return self._read_recipe(reference.removeprefix(RECIPE))
        except PluginError as error:
            raise _at(named_by, str(error), "extends") from error


def _read_file(path: str, named_by: Node | None) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _at(named_by, f"can't read the configuration {path}: {error.strerror}", "extends") from error
    except UnicodeDecodeError as error:
        raise _at(named_by, f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", "extends") from error


def _at(node: Node | None, message: str, key: str) -> ConfigError:
    """An error at ``node``, or one without a place where the user's own command is to blame."""
    if node is None:
        return ConfigError(message)
    return ConfigError(message, key=key, file=node.file, line=node.line)


def _merge(below: Node, above: Node) -> Node:
    """Mappings are merged key by key; anything else is replaced as a whole."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    merged = dict(below.value)
    for key, node in above.value.items():
        merged[key] = _merge(merged[key], node) if key in merged else node
    return replace(above, value=merged)


def _override(root: Node, text: str) -> Node:
    key, equals, value = text.partition("=")
    path = split_key(key.strip())
    if not equals or not all(path):
        raise ConfigError(f"expected key=value such as training.lr=1e-5, got {text!r}", file=COMMAND_LINE)
    if path == ("extends",):
        raise ConfigError(
            "can't be set here; name the file or recipe to build on as CONFIG", key=key, file=COMMAND_LINE
        )
    try:
        new = parse_yaml(value, COMMAND_LINE, has_lines=False)
    except ConfigError as error:
        raise ConfigError(f"{error.message} in {text!r}", key=key, file=COMMAND_LINE) from error
    return _set(root, path, new, path)


def _set(node: Node, path: KeyPath, new: Node, whole: KeyPath) -> Node:
    """``node`` with ``new`` at ``path``; missing mappings on the way are made."""
    if not path:
        return new
    part, rest = str(path[0]), path[1:]
    done = dotted(whole[: len(whole) - len(path)])
    if isinstance(node.value, list):
        if not part.isdigit() or int(part) >= len(node.value):
            raise ConfigError(
                f"{done} is a list of {len(node.value)}; expected a position from 0 to {len(node.value) - 1}, "
                f"got {part!r}",
                key=dotted(whole),
                file=COMMAND_LINE,
            )
        items = list(node.value)
        items[int(part)] = _set(items[int(part)], rest, new, whole)
        return replace(node, value=items)
    if not isinstance(node.value, dict) and node.value is not None:
        raise ConfigError(
            f"{done} is the value {node.text or node.value!r}, which has no key {part!r}",
            key=dotted(whole),
            file=COMMAND_LINE,
        )
    children: Mapping[str, Node] = node.value or {}
    below = children.get(part, Node(None, COMMAND_LINE, None))
    return replace(node, value={**children, part: _set(below, rest, new, whole)})


def _drop_retired(root: Node) -> Node:
    """Removed keys with the only value they had: resolved configurations of earlier versions contain them."""
    for path, (value, instead) in _RETIRED.items():
        root = _drop(root, path, value, instead)
    return root


def _drop(node: Node, path: tuple[str, ...], value: Any, instead: str, done: KeyPath = ()) -> Node:
    if not isinstance(node.value, dict):
        return node
    children: dict[str, Node] = dict(node.value)
    for name in [name for name in children if path[0] in (name, "*")]:
        child = children[name]
        if len(path) > 1:
            children[name] = _drop(child, path[1:], value, instead, (*done, name))
        elif child.value == value:
            del children[name]
        else:
            raise ConfigError(instead, key=dotted((*done, name)), file=child.file, line=child.line)
    return replace(node, value=children)


def _rename_aliases(root: Node) -> Node:
    """Other names of a sub-model's ``load_format``, as the origin of this vocabulary has them, become that key."""
    model = root.value.get("model")
    if model is None or not isinstance(model.value, dict):
        return root
    model = _rename_in(model, ("model",))
    models = model.value.get("models")
    if models is not None and isinstance(models.value, dict):
        renamed = {name: _rename_in(node, ("model", "models", name)) for name, node in models.value.items()}
        model = replace(model, value={**model.value, "models": replace(models, value=renamed)})
    return replace(root, value={**root.value, "model": model})


def _rename_in(node: Node, path: KeyPath) -> Node:
    if not isinstance(node.value, dict):
        return node
    result: dict[str, Node] = {}
    written: dict[str, str] = {}
    key: str
    for key, value in node.value.items():
        name = _ALIASES.get(key, key)
        if name in result:
            message = f"{written[name]} and {key} are two names of the same key; keep one"
            raise ConfigError(message, key=dotted((*path, key)), file=value.file, line=value.line)
        result[name], written[name] = value, key
    return replace(node, value=result)


def _complete_mixes(root: Node) -> Node:
    """Keys next to a list of data sets apply to every one of them that doesn't set its own."""
    data = root.value.get("data")
    if data is None or not isinstance(data.value, dict):
        return root
    completed = {
        key: _complete_mix(node) if key.endswith("dataset_param") else node for key, node in data.value.items()
    }
    return replace(root, value={**root.value, "data": replace(data, value=completed)})


def _complete_mix(param: Node) -> Node:
    mix = param.child("datasets")
    if mix is None or not isinstance(mix.value, list):
        return param
    shared = {key: node for key, node in param.value.items() if key != "datasets"}
    entries = [
        replace(entry, value=shared | entry.value) if isinstance(entry.value, dict) else entry for entry in mix.value
    ]
    return replace(param, value={"datasets": replace(mix, value=entries)})


def _expand(node: Node, environment: Environment, undefined: list[Undefined], path: KeyPath) -> Node:
    if isinstance(node.value, str):
        text, names = environment.expand(node.value)
        if names:
            undefined.append(Undefined(dotted(path), tuple(names)))
        return replace(node, value=text)
    if isinstance(node.value, dict):
        return replace(node, value={k: _expand(v, environment, undefined, (*path, k)) for k, v in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_expand(v, environment, undefined, (*path, i)) for i, v in enumerate(node.value)])
    return node
