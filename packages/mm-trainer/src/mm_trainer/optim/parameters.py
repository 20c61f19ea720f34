"""Patterns over parameter names, for `freeze`, `no_decay_params` and `lr_scaling_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mm_parallel.patterns import PatternError, compile_pattern, nearest
from mm_trainer.errors import ConfigError


def match_parameters(names: Iterable[str], patterns: Sequence[str], *, key: str) -> set[str]:
    """Names of the parameters that any pattern means.

    The vocabulary is that of module patterns (``{*}``, ``{0-9}``, ``*`` within a component). A pattern means a
    parameter if it matches its whole name (``blocks.0.ffn.0.bias``), the name of a module around it
    (``blocks.{0-3}``), or the last components of its name (``bias``, ``norm3.weight``).

    Args:
        names: full parameter names.
        patterns: each must match something.
        key: dotted key of the setting they come from.

    Raises:
        ConfigError: a pattern that is malformed or matches nothing, with the nearest names.
    """
    parts = {name: _parts(name) for name in names}
    matched: set[str] = set()
    for position, pattern in enumerate(patterns):
        place = f"{key}.{position}"
        try:
            expression = compile_pattern(pattern, what="pattern")
        except PatternError as error:
            raise ConfigError(str(error), key=place) from error
        found = {name for name, own in parts.items() if any(expression.fullmatch(part) for part in own)}
        if not found:
            close = nearest(pattern, sorted({part for own in parts.values() for part in own}))
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise ConfigError(f"pattern {pattern!r} matches no parameter{hint}", key=place)
        matched |= found
    return matched


def full_name(prefix: str, name: str) -> str:
    """``name`` below ``prefix``, which may be empty."""
    return f"{prefix}.{name}" if prefix else name


def _parts(name: str) -> set[str]:
    components = name.split(".")
    heads = {".".join(components[:end]) for end in range(1, len(components) + 1)}
    tails = {".".join(components[start:]) for start in range(len(components))}
    return heads | tails
