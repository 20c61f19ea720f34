"""The one place where mm-trainer reads the process environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_REFERENCE = re.compile(r"\$(?:\$|\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))")


@dataclass(frozen=True)
class Environment:
    """What a configuration may refer to.

    Args:
        variables: environment variables.
        cwd: directory of the start command, absolute; relative paths count from it.
        home: what ``~`` stands for.
    """

    variables: Mapping[str, str]
    cwd: str
    home: str

    @classmethod
    def read(cls) -> Environment:
        """The environment of this process, now."""
        return cls(dict(os.environ), os.getcwd(), os.path.expanduser("~"))

    def expand(self, text: str) -> tuple[str, list[str]]:
        """Replace ``${NAME}``, ``$NAME`` and a leading ``~/``; ``$$`` is a dollar sign.

        Returns:
            the text, and the names that are not defined (their references stay as they are).
        """
        undefined: list[str] = []

        def replace(match: re.Match[str]) -> str:
            name = match["braced"] or match["bare"]
            if name is None:
                return "$"
            if name not in self.variables:
                undefined.append(name)
                return match[0]
            return self.variables[name]

        if text == "~" or text.startswith("~/"):
            text = self.home + text[1:]
        return _REFERENCE.sub(replace, text), undefined
