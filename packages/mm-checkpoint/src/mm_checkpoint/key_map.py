"""Key maps: one table between a source's names and a model's own, read in both directions.

A name matches the exact table first, then the first rule whose template fits. Templates are dotted names in which
``{x}`` stands for one component and ``{x*}`` for one or more:

    KeyMap(
        "toy",
        exact={"scale_shift_table": "head.modulation"},
        rules=[("layers.{n}.to_{qkv}.{p}", "blocks.{n}.attn.{qkv}.{p}")],
        ops=[Split("qkv.{p}", ("q.{p}", "k.{p}", "v.{p}"))],
        dropped=["_extra_state"],
    )
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points

from mm_checkpoint.errors import KeyMapError, nearest, sample

ENTRY_POINT_GROUP = "mm_checkpoint.key_maps"
_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)(\*?)\}")


class Template:
    """A dotted name with placeholders, to match names or to be filled in."""

    def __init__(self, text: str) -> None:
        self.text = text
        pattern, position = "", 0
        for hit in _PLACEHOLDER.finditer(text):
            pattern += re.escape(text[position : hit.start()])
            pattern += f"(?P<{hit[1]}>{'.+' if hit[2] else '[^.]+'})"
            position = hit.end()
        try:
            self._pattern = re.compile(pattern + re.escape(text[position:]))
        except re.error as error:
            raise KeyMapError(f"template {text!r}: {error}") from error
        self.names = frozenset(self._pattern.groupindex)

    def match(self, key: str) -> dict[str, str] | None:
        """What the placeholders stand for in ``key``; None if it doesn't fit."""
        hit = self._pattern.fullmatch(key)
        return None if hit is None else hit.groupdict()

    def fill(self, groups: Mapping[str, str]) -> str:
        """The name with the placeholders replaced."""
        return _PLACEHOLDER.sub(lambda hit: groups[hit[1]], self.text)


@lru_cache(maxsize=4096)
def _template(text: str) -> Template:
    return Template(text)


@dataclass(frozen=True)
class Split:
    """One source tensor becomes several native ones, cut along ``dim`` (equally, or by ``sizes``)."""

    source: str
    native: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.source,), tuple(self.native)


@dataclass(frozen=True)
class Concat:
    """Several source tensors become one native one, joined along ``dim``; ``sizes`` if the way back isn't equal."""

    source: tuple[str, ...]
    native: str
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.source), (self.native,)


@dataclass(frozen=True)
class Transpose:
    """Two dimensions are swapped, in either direction."""

    source: str
    native: str
    dims: tuple[int, int] = (0, 1)

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.source,), (self.native,)


TensorOp = Split | Concat | Transpose


@dataclass(frozen=True)
class KeyMap:
    """A one-to-one table between source names and native names.

    Attributes:
        name: what it is registered as.
        exact: source name to native name.
        rules: ordered pairs of templates (source, native); the first that fits counts. Both sides of a pair use the
            same placeholders.
        ops: tensors that are split, joined or transposed on the way; they come before ``exact`` and ``rules``.
        dropped: templates of source names that have no native counterpart and are left out (and reported).

    Raises:
        KeyMapError: the table itself isn't one-to-one, or a pair's placeholders differ.
    """

    name: str
    exact: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[tuple[str, str]] = ()
    ops: Sequence[TensorOp] = ()
    dropped: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(set(self.exact.values())) != len(self.exact):
            raise KeyMapError(f"key map {self.name}: two exact entries lead to one native name")
        pairs = [*self.rules, *((s, n) for op in self.ops for s in op.sides[0] for n in op.sides[1])]
        for source, native in pairs:
            if _template(source).names != _template(native).names:
                raise KeyMapError(f"key map {self.name}: {source!r} and {native!r} use different placeholders")

    @cached_property
    def _inverse(self) -> dict[str, str]:
        return {native: source for source, native in self.exact.items()}

    def to_native(self, key: str) -> str | None:
        """The native name of source name ``key``; None if it is dropped.

        Raises:
            KeyMapError: no rule covers it, or it takes part in a tensor op, and so has no single counterpart.
        """
        if any(_template(text).match(key) is not None for text in self.dropped):
            return None
        return self._rename(key, self.exact, 0)

    def to_source(self, key: str) -> str:
        """The source name of native name ``key``; raises as `to_native`."""
        return self._rename(key, self._inverse, 1)

    def _rename(self, key: str, exact: Mapping[str, str], side: int) -> str:
        if any(_template(text).match(key) is not None for op in self.ops for text in op.sides[side]):
            raise KeyMapError(f"key map {self.name}: {key} takes part in a tensor op and has no single counterpart")
        if key in exact:
            return exact[key]
        for pair in self.rules:
            groups = _template(pair[side]).match(key)
            if groups is not None:
                return _template(pair[1 - side]).fill(groups)
        raise KeyMapError(f"key map {self.name}: no rule covers {'source' if side == 0 else 'native'} name {key}")

    def uncovered(self, keys: Iterable[str], *, to: str) -> list[str]:
        """The keys that neither a rule, nor a tensor op, nor ``dropped`` covers."""
        side = 0 if to == "native" else 1
        table = self.exact if side == 0 else self._inverse
        texts = [pair[side] for pair in self.rules] + [text for op in self.ops for text in op.sides[side]]
        texts += self.dropped if side == 0 else ()
        return [key for key in keys if key not in table and all(_template(text).match(key) is None for text in texts)]

    def rename_all(self, keys: Iterable[str], *, to: str) -> dict[str, str]:
        """Rename many keys that take part in no tensor op: old name to new name, dropped ones left out.

        Args:
            keys: source names (``to="native"``) or native names (``to="source"``).
            to: the direction.

        Raises:
            KeyMapError: keys that no rule covers, several that collide, or one that doesn't map back to itself; the
                message has counts and a few names.
        """
        keys = list(keys)
        uncovered = self.uncovered(keys, to=to)
        if uncovered:
            raise KeyMapError(self._explain(uncovered, 0 if to == "native" else 1))
        renamed: dict[str, str] = {}
        for key in keys:
            new = self.to_native(key) if to == "native" else self.to_source(key)
            if new is not None:
                renamed[key] = new
        self._check_one_to_one(renamed, to)
        return renamed

    def _explain(self, uncovered: list[str], side: int) -> str:
        rules = [*(self.exact if side == 0 else self._inverse), *(pair[side] for pair in self.rules)]
        hint = nearest(min(uncovered), rules, 1)
        guess = f"; nearest rule: {hint[0]}" if hint else ""
        return f"key map {self.name}: no rule covers {len(uncovered)} name(s): {sample(uncovered)}{guess}"

    def _check_one_to_one(self, renamed: Mapping[str, str], to: str) -> None:
        origin: dict[str, str] = {}
        for old, new in renamed.items():
            if new in origin:
                raise KeyMapError(f"key map {self.name}: {origin[new]} and {old} both become {new}")
            origin[new] = old
        for old, new in renamed.items():
            back = self.to_source(new) if to == "native" else self.to_native(new)
            if back != old:
                raise KeyMapError(f"key map {self.name}: {old} becomes {new}, which would come back as {back}")


def _installed() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


_registered: dict[str, KeyMap] = {}
"""Key maps of code that isn't packaged, by name."""


def register_key_map(key_map: KeyMap) -> KeyMap:
    """Offer a key map under its name in this process, for code that isn't packaged; a package has an entry point.

    Returns:
        the key map, so that the call may stand around its making.

    Raises:
        KeyMapError: a distribution offers another one under that name.
    """
    if key_map.name in _installed():
        raise KeyMapError(f"key map {key_map.name!r} is installed already; give yours another name")
    _registered[key_map.name] = key_map  # a module that is run again replaces its own
    return key_map


def list_key_maps() -> list[str]:
    """Names of the key maps that are installed or registered; imports none of them."""
    return sorted({*_installed(), *_registered})


def get_key_map(name: str) -> KeyMap:
    """The key map ``name``, registered in this process or by a distribution in group ``mm_checkpoint.key_maps``.

    Raises:
        KeyMapError: there is none, two distributions claim it, or it can't be imported.
    """
    if name in _registered:
        return _registered[name]
    installed = _installed()
    entries = {entry.value: entry for entry in installed.get(name, [])}
    if not entries:
        known = ", ".join(sorted(installed)) or "none"
        hint = nearest(name, installed)
        guess = f"; did you mean {hint[0]}?" if hint else ""
        raise KeyMapError(
            f"no key map {name!r} in group {ENTRY_POINT_GROUP} (installed: {known}){guess}; one that a module "
            "registers is there once the module is imported (on the command line: --plugin MODULE)"
        )
    if len(entries) > 1:
        owners = ", ".join(f"{entry.dist.name if entry.dist else '?'} ({value})" for value, entry in entries.items())
        raise KeyMapError(f"key map {name!r} is claimed by several distributions: {owners}")
    entry = next(iter(entries.values()))
    owner = entry.dist.name if entry.dist else "an unknown distribution"
    try:
        found = entry.load()
    except Exception as error:
        raise KeyMapError(f"key map {name!r} of {owner} ({entry.value}) can't be imported: {error}") from error
    if not isinstance(found, KeyMap):
        raise KeyMapError(f"key map {name!r} of {owner} ({entry.value}) is a {type(found).__name__}, not a KeyMap")
    return found
