"""Buffers that a recomputed forward changes: counted once, and seen the second time as they were the first time.

A counter or a running mean would otherwise advance twice per step, and the second run would compute with other values
than the first, whose gradients it is run for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

MOST_ELEMENTS = 2**16
"""Larger buffers aren't kept from the first run to the second: they are tables, and one that changes is refused."""

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def replaying_buffers(module: nn.Module) -> Callable[[], Contexts] | None:
    """What to put around the first and the second run of ``module``'s forward; asked anew for each pair of runs.

    Returns:
        None if the module has no buffers.
    """
    if next(module.buffers(), None) is None:
        return None

    def contexts() -> Contexts:
        replay = _Replay(module)
        return replay.first_run(), replay.second_run()

    return contexts


class _Replay:
    """One pair of runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []

    @contextmanager
    def first_run(self) -> Iterator[None]:
        large = []
        for path, owner in self._module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                if buffer.numel() <= MOST_ELEMENTS:
                    # A copy per forward: whether this one will change isn't known before, and it is small.
                    self._before.append((owner, name, buffer.detach().clone()))
                else:
                    large.append((owner, name, f"{path}.{name}".strip("."), buffer, buffer._version))
        yield
        for owner, name, path, buffer, version in large:
            if owner._buffers[name] is not buffer or buffer._version != version:
                raise RuntimeError(
                    f"{type(self._module).__qualname__} changes its buffer {path} ({buffer.numel():,} elements) in its "
                    "forward, which recompute runs twice; leave the module out of features.recompute_plan"
                )

    @contextmanager
    def second_run(self) -> Iterator[None]:
        after = [(owner, name, owner._buffers[name]) for owner, name, _ in self._before]
        for owner, name, before in self._before:
            # Another tensor in its place, and not a copy into it: what the second run saves for the backward would
            # otherwise change once the buffer is set back.
            owner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for owner, name, value in after:
                owner._buffers[name] = value
