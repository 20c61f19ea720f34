"""Condition batching: encode the conditions of several micro-batches in one pass of the frozen encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
Prepare = Callable[[Batch], Mapping[str, Tensor]]


class ConditionBatcher:
    """Sits between loader and engine, which doesn't know it exists.

    Takes ``every`` micro-batches, stacks those whose tensors have equal shapes, calls ``prepare`` once per stack, and
    yields the micro-batches in their old order, each with its rows under ``"conditions"``. The encoders of a sharded
    sub-model so gather their weights once for ``every`` micro-batches.

    Args:
        batches: the loader.
        prepare: conditions of a (stacked) batch; no row may depend on another.
        every: micro-batches encoded together; must divide the number of micro-batches that are drawn.
    """

    def __init__(self, batches: Iterable[Batch], prepare: Prepare, *, every: int) -> None:
        self._batches, self._prepare, self._every = batches, prepare, every

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self._batches)
        while window := list(islice(source, self._every)):
            yield from self._encode(window)

    def _encode(self, window: list[Batch]) -> list[Batch]:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, batch in enumerate(window):
            groups.setdefault(_signature(batch), []).append(i)
        encoded: list[Batch] = [{} for _ in window]
        for members in groups.values():
            stacked = _stack([window[i] for i in members])
            rows = [len(window[i]["sample_key"]) for i in members]
            conditions = {key: value.split(rows) for key, value in self._prepare(stacked).items()}
            for slot, i in enumerate(members):
                encoded[i] = {**window[i], "conditions": {key: parts[slot] for key, parts in conditions.items()}}
        return encoded


def _signature(batch: Batch) -> tuple[Any, ...]:
    return tuple((key, tuple(value.shape[1:])) for key, value in sorted(batch.items()) if isinstance(value, Tensor))


def _stack(batches: list[Batch]) -> Batch:
    first = batches[0]
    return {
        key: torch.cat([batch[key] for batch in batches]) if isinstance(value, Tensor) else value
        for key, value in first.items()
        if isinstance(value, Tensor)
    }
