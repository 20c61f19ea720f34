"""Patterns over parameter names, for `freeze`, `no_decay_params` and `lr_scaling_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mm_parallel import PatternError, compile_pattern, nearest_names


def match_parameters(names: Iterable[str], patterns: Sequence[str], *, what: str) -> set[str]:
    """Names of the parameters that any pattern means.

    The vocabulary is that of module patterns (``{*}``, ``{0-9}``, ``*`` within a component). A pattern means a
    parameter if it matches its whole name (``blocks.0.ffn.0.bias``), the name of a module around it
    (``blocks.{0-3}``), or the last components of its name (``bias``, ``norm3.weight``).

    Args:
        names: full parameter names.
        patterns: each must match something.
        what: the setting they come from, for the message.

    Raises:
        PatternError: a pattern that matches nothing, with the nearest names.
    """
    names = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        expression = compile_pattern(pattern, what=what)
        found = {name for name in names if any(expression.fullmatch(part) for part in _parts(name))}
        if not found:
            raise PatternError(f"{what}: {pattern!r} matches no parameter; nearest: {nearest_names(pattern, names)}")
        matched |= found
    return matched


def _parts(name: str) -> set[str]:
    components = name.split(".")
    heads = {".".join(components[:end]) for end in range(1, len(components) + 1)}
    tails = {".".join(components[start:]) for start in range(len(components))}
    return heads | tails
