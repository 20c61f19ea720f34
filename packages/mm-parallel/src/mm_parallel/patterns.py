"""Module-name patterns: what a plan's strings mean, and the message when one of them matches nothing.

Vocabulary, per path component (the parts between dots of a ``named_modules()`` name):

- ``{*}`` or ``*`` — any one component, such as a block's number;
- ``{2-5}`` — a number from 2 to 5, both included;
- ``*`` inside a component — any run of characters: ``layer*``;
- anything else — itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mm_parallel.errors import PatternError, below

if TYPE_CHECKING:
    from torch import nn

_TOKEN = re.compile(r"\{[^}]*\}|\*|[^{*]+|\{")
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")


def match_modules(model: nn.Module, patterns: Sequence[str], *, what: str) -> dict[str, list[str]]:
    """Names of the modules that each pattern matches, in the order of ``named_modules()``.

    Works on a model built on meta and needs no process group. A module that is registered under several names can be
    matched by any of them.

    Args:
        model: patterns are matched against its ``named_modules()``.
        patterns: see the vocabulary above.
        what: the setting that the patterns come from, for messages.

    Raises:
        PatternError: a pattern is malformed or matches nothing; all dead patterns are named, with the nearest names.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matches = {}
    for position, pattern in enumerate(patterns):
        with below(position):
            expression = compile_pattern(pattern, what=what)
        matches[pattern] = [name for name in names if expression.fullmatch(name)]
    dead = [
        PatternError(what, _nothing_matches(pattern, names), path=(position,))
        for position, pattern in enumerate(patterns)
        if not matches[pattern]
    ]
    if dead:
        raise PatternError(what, dead[0].message, path=dead[0].path, also=dead[1:])
    return matches


def match_callable_modules(model: nn.Module, patterns: Sequence[str], *, what: str) -> dict[str, list[str]]:
    """:func:`match_modules`, but every match must have a forward: a ``ModuleList`` is refused.

    Raises:
        PatternError: as there, or a pattern names a container without a forward.
    """
    from torch import nn

    matches = match_modules(model, patterns, what=what)
    for position, pattern in enumerate(patterns):
        for name in matches[pattern]:
            if isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
                raise PatternError(
                    what,
                    f"{pattern!r} names {name!r}, a list of modules that has no forward of its own; name its items: "
                    f"{name}.{{*}}",
                    path=(position,),
                )
    return matches


def compile_pattern(pattern: str, *, what: str) -> re.Pattern[str]:
    """The regular expression of one pattern (for ``fullmatch``).

    Raises:
        PatternError: braces that are neither ``{*}`` nor a range.
    """
    components = [_component(component, pattern, what) for component in pattern.split(".")]
    return re.compile(r"\.".join(components))


def _component(component: str, pattern: str, what: str) -> str:
    if component in ("*", "{*}"):
        return r"[^.]+"
    expression = ""
    for token in _TOKEN.findall(component):
        if token in ("*", "{*}"):
            expression += r"[^.]*"
        elif token.startswith("{"):
            expression += _number_range(token, pattern, what)
        else:
            expression += re.escape(token)
    return expression


def _number_range(token: str, pattern: str, what: str) -> str:
    found = _RANGE.fullmatch(token)
    if found is None or int(found[1]) > int(found[2]):
        raise PatternError(
            what, f"{pattern!r} contains {token!r}; braces hold {{*}} for any one name or a range such as {{0-9}}"
        )
    return "(?:" + "|".join(str(n) for n in range(int(found[1]), int(found[2]) + 1)) + ")"


def _nothing_matches(pattern: str, names: Sequence[str]) -> str:
    near = nearest(pattern, [*names, *(_generalised(name) for name in names)])
    hint = f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(_top_level(names))}"
    return f"{pattern!r} matches no module{hint}"


def nearest(name: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """At most ``n`` of ``choices`` that look like ``name``, most alike first."""
    return get_close_matches(name, list(dict.fromkeys(choices)), n=n, cutoff=0.6)


def _generalised(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", name)


def _top_level(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".")[0] for name in names)) or ["no sub-modules"]
