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


@dataclass(frozen=True)
class RankEnvironment:
    """Which rank this process is, as torchrun and our launcher tell it.

    Args:
        rank: 0 … world_size − 1.
        local_rank: the same on this host.
        world_size: all ranks.
        restarts: how often the ranks were started again after a failure.
        supervised: started by our own launcher, which prints the first error itself.
        error_file: where the launcher wants to be told what went wrong.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    restarts: int = 0
    supervised: bool = False
    error_file: str | None = None

    @classmethod
    def read(cls) -> RankEnvironment | None:
        """The rank that this process is, or None in a process that isn't one."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ["WORLD_SIZE"]),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            supervised=SUPERVISED in os.environ,
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
        )


SUPERVISED = "MM_TRAINER_SUPERVISED"
"""Set by our launcher in the ranks it starts."""
