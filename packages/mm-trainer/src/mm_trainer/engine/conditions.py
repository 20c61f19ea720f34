"""Condition batching: encode the conditions of several micro-batches in one pass of the frozen encoders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm_trainer.data.batch import Batch
from mm_trainer.errors import ConfigError

log = logging.getLogger(__name__)

Conditions = Mapping[str, Tensor]
Prepare = Callable[[Batch], Conditions]


class ConditionBatcher:
    """Sits between loader and engine, which doesn't know it exists.

    Takes ``every`` micro-batches, stacks those whose tensors have equal shapes, calls ``prepare`` once per stack, and
    yields the micro-batches in their old order, each with its rows under ``"conditions"``. So the encoders of a sharded
    sub-model gather their weights once for ``every`` micro-batches.

    Ranks whose micro-batches fall into fewer stacks than others' encode one of theirs again: sharded encoders are
    collective, so every rank has to call them equally often.

    The ranks of a context-parallel group hold the same micro-batches. Each encodes its share of them and they exchange
    the results; where ``every`` is no multiple of the group's size, each encodes all.

    Args:
        batches: the loader.
        prepare: conditions of a (stacked) batch; no row may depend on another.
        every: micro-batches encoded together.
        context_group: the ranks that share this rank's sequences; None if there are no others.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        prepare: Prepare,
        *,
        every: int,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._batches, self._prepare, self._every = batches, prepare, every
        self._group = context_group
        if context_group is not None and every % context_group.size():
            log.info(
                "condition_mbs %d is no multiple of the %d ranks that share a sequence: each of them encodes all",
                every,
                context_group.size(),
            )
            self._group = None

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self._batches)
        while window := list(islice(source, self._every)):
            if "conditions" in window[0]:
                raise ConfigError(
                    "the data set brings its conditions along, so none are made here: leave it at 1",
                    key="training.condition_mbs",
                )
            for batch, conditions in zip(window, self._conditions(window), strict=True):
                yield {**batch, "conditions": conditions}

    def _conditions(self, window: Sequence[Batch]) -> list[Conditions]:
        if self._group is None:
            encoded = self._encode(dict(enumerate(window)))
            return [encoded[slot] for slot in range(len(window))]
        # Interleaved, so that a slot's number alone tells which rank encoded it.
        own = range(self._group.rank(), len(window), self._group.size())
        return _exchange(self._encode({slot: window[slot] for slot in own}), self._group)

    def _encode(self, slots: Mapping[int, Batch]) -> dict[int, Conditions]:
        stacks: dict[tuple[Any, ...], list[int]] = {}
        for slot, batch in slots.items():
            stacks.setdefault(_signature(batch), []).append(slot)
        members = list(stacks.values())
        encoded: dict[int, Conditions] = {}
        # Repeat the last stack until all ranks have called the encoders equally often; a sharded forward is collective.
        for slots_of_stack in members + members[-1:] * (_largest(len(members)) - len(members)):
            conditions = self._prepare(_stack([slots[slot] for slot in slots_of_stack]))
            rows = [len(slots[slot]["sample_key"]) for slot in slots_of_stack]
            parts = {name: value.split(rows) for name, value in conditions.items()}
            for place, slot in enumerate(slots_of_stack):
                encoded[slot] = {name: split[place] for name, split in parts.items()}
        return encoded


def _largest(count: int) -> int:
    """The maximum over all ranks; on the host, so that no device is waited for."""
    if not dist.is_initialized():
        return count
    largest = torch.tensor(count)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _exchange(own: Mapping[int, Conditions], group: dist.ProcessGroup) -> list[Conditions]:
    """Everybody's slots in order; slot i was encoded by rank i modulo the group's size."""
    described = {slot: {name: (value.shape, value.dtype) for name, value in c.items()} for slot, c in own.items()}
    device = next(iter(next(iter(own.values())).values())).device
    everybody: list[Any] = [None] * group.size()
    # Shapes first: the receiving side of a broadcast needs a tensor of the right shape and dtype.
    dist.all_gather_object(everybody, described, group=group)
    layout = {slot: tensors for part in everybody for slot, tensors in part.items()}
    exchanged: list[Conditions] = []
    for slot in sorted(layout):
        received = {}
        for name, (shape, dtype) in layout[slot].items():
            tensor = own[slot][name].contiguous() if slot in own else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group=group, group_src=slot % group.size())
            received[name] = tensor
        exchanged.append(received)
    return exchanged


def _signature(batch: Batch) -> tuple[Any, ...]:
    return tuple((key, tuple(value.shape[1:])) for key, value in sorted(batch.items()) if isinstance(value, Tensor))


def _stack(batches: Sequence[Batch]) -> Batch:
    """One batch of the tensors of several; lists are joined as well, other values are left out."""
    first = batches[0]
    stacked: Batch = {}
    for key, value in first.items():
        if isinstance(value, Tensor):
            stacked[key] = torch.cat([batch[key] for batch in batches])
        elif isinstance(value, list):
            stacked[key] = [item for batch in batches for item in batch[key]]
    return stacked
