"""Requests from outside to stop or to save: signals and files, agreed on by all ranks at the end of a step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

STOP_FILE, SAVE_FILE = "stop", "save_now"


@dataclass(frozen=True)
class Request:
    """What all ranks agreed to do after this step."""

    stop: bool = False
    save: bool = False


class RequestWatcher:
    """Turns SIGTERM, SIGINT and two files in the run's folder into a request that every rank sees at the same step.

    - the first SIGTERM or SIGINT on any rank: finish the step, save, end with code 0. A second one gets the default
      treatment, so that a rank that hangs can be killed by the launcher without waiting;
    - a file ``stop`` in the folder: the same; a file ``save_now``: save and go on. Rank 0 looks for them, and removes
      them.

    Agreement is one all-reduce of a small integer on the host per step: it waits for no device.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._signalled = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block; handlers belong to the main thread."""
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in previous:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    def poll(self) -> Request:
        """Called on all ranks after every step; the answer is the same on all of them."""
        bits = int(self._signalled)
        if self._folder is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            bits |= 1 * self._take(STOP_FILE) | 2 * self._take(SAVE_FILE)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flags = torch.tensor([bits & 1, bits & 2], dtype=torch.int32)
            dist.all_reduce(flags)
            bits = int(flags[0] > 0) | 2 * int(flags[1] > 0)
        return Request(stop=bool(bits & 1), save=bool(bits & 2))

    def _take(self, name: str) -> bool:
        assert self._folder is not None
        path = self._folder / name
        if not path.is_file():
            return False
        path.unlink(missing_ok=True)
        log.info("found %s", path)
        return True
