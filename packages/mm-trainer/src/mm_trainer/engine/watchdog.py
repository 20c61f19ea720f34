"""Prints where a rank hangs when a step outlasts its limit."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def watchdog(limit_s: float) -> Iterator[None]:
    """Print every thread's stack of this rank to stderr if the block takes longer than ``limit_s`` seconds.

    The process isn't ended: the process group's timeout does that, and by then the stacks of all ranks are in the log.
    The timer is a C thread, so it fires also while Python is stuck in a collective.

    Args:
        limit_s: 0 turns it off.
    """
    if limit_s <= 0:
        yield
        return
    faulthandler.dump_traceback_later(limit_s, repeat=False, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
