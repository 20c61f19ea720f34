"""Fixtures of this package's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run_ranks(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The session's rank pool, with what DTensor and DCP import on first use imported once, before the forks."""
    return partial(run_ranks, preload=("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"))
