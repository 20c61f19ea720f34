"""Activations wait for the backward in host memory.

[Note: Offload] While a module's forward runs, every tensor that autograd saves is copied to the host, and the graph
keeps the copy. Parameters and views of them stay: under FSDP2 they are freed anyway. Copies are made of stretches of
storage, not of tensors: views and transposes that share memory share one copy, as do several modules that save one
tensor, as long as it isn't written to. On an accelerator, copies run on a stream of their own, from and to pinned
memory: at most ``window`` modules' tensors are on their way out (the forward then waits for the oldest), and when the
backward reaches a module, those of the ``window`` modules before it are fetched ahead. Nothing outlives the graph that
needs it: a forward without a backward leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mm_parallel.activations.forward_layers import Forward
from mm_parallel.config import ActivationOffloadPlan
from mm_parallel.devices import accelerator

_Key = tuple[StorageWeakRef, int, int, int]


class ActivationOffload:
    """What the modules of one model share: known copies, and what is on its way out."""

    def __init__(self, plan: ActivationOffloadPlan) -> None:
        self._plan = plan
        # Weak references: only the graph keeps a copy alive, so a copy goes with its graph.
        self._copies: weakref.WeakValueDictionary[_Key, _HostCopy] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[_Group] | None = None
        self._leaving: deque[_Departure] = deque()

    def around(self, forward: Forward) -> Forward:
        """``forward``, with what it saves for its backward in host memory."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # autograd saves nothing
                return forward(*args, **kwargs)
            group = _Group(self._latest, self._plan.window, self._leaving)
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, group), _unpack):
                output = forward(*args, **kwargs)
            self._depart(group)
            return output

        return run

    def _pack(self, tensor: torch.Tensor, group: _Group) -> torch.Tensor | _Saved:
        if not self._goes_to_host(tensor):
            return tensor
        start, stop = _stretch(tensor)
        # The version tells apart what the same memory held before and after a write in place.
        key = (StorageWeakRef(tensor.untyped_storage()), tensor._version, start, stop)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = _HostCopy(tensor, start, stop)
            group.add(copy, tensor)
        first_element = int(tensor.storage_offset()) - start // tensor.element_size()
        return _Saved(copy, group, tensor.dtype, tensor.shape, tensor.stride(), first_element)

    def _goes_to_host(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if tensor.device.type == "cpu" and accelerator() is not None:  # it is on the host already
            return False
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
        return is_plain and tensor.nbytes >= max(self._plan.min_bytes, 1)

    def _depart(self, group: _Group) -> None:
        """The module has run: remember its group for prefetching, and bound how many are on their way out."""
        departure = group.departure()
        if departure is None:
            return
        self._latest = weakref.ref(group)
        self._leaving.append(departure)
        while len(self._leaving) > self._plan.window or (self._leaving and self._leaving[0].has_left()):
            self._leaving.popleft().wait()


@dataclass(frozen=True)
class _Saved:
    """What the graph holds in place of a tensor."""

    copy: _HostCopy
    group: _Group
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    first_element: int


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    saved.group.fetch_ahead()
    storage = saved.copy.on_device().untyped_storage()
    tensor = torch.empty(0, dtype=saved.dtype, device=storage.device)
    return tensor.set_(storage, saved.first_element, saved.shape, saved.stride)


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage to copy: all of them, unless the tensor spans less than half."""
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, stop = first * size, (last + 1) * size
    whole = tensor.untyped_storage().nbytes()
    return (start, stop) if 2 * (stop - start) < whole else (0, whole)


class _SideStream:
    """The stream on which one device's copies run; on a CPU all of this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device.type)
        self.stream = self.module.Stream()

    @classmethod
    @cache
    def of(cls, device: torch.device) -> _SideStream:
        """The only one of ``device``."""
        return cls(device)

    def after_current(self) -> AbstractContextManager[Any]:
        """What is issued inside runs on this stream, after everything issued to the current one so far."""
        self.stream.wait_stream(self.module.current_stream())
        return self.module.stream(self.stream)

    def record(self) -> Any:
        """An event after everything issued to this stream so far."""
        event = self.module.Event()
        event.record(self.stream)
        return event


class _HostCopy:
    """A stretch of device memory, in host memory, and back again."""

    def __init__(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        self._device = tensor.device
        self._streams = _SideStream.of(tensor.device)
        self._is_async = tensor.device.type != "cpu"  # without an accelerator, device and host are the same memory
        # As bytes: one copy serves views of any dtype and shape.
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
        self._host = torch.empty(stop - start, dtype=torch.uint8, pin_memory=self._is_async)
        with self._streams.after_current():
            self._host.copy_(source, non_blocking=self._is_async)
        self._returned: tuple[torch.Tensor, Any] | None = None

    def start_return(self) -> None:
        """Begin the copy back to the device, if it hasn't begun."""
        if self._returned is None:
            back = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            with self._streams.after_current():
                back.copy_(self._host, non_blocking=self._is_async)
            event = self._streams.record()
            if self._is_async:
                back.record_stream(self._streams.stream)  # it may be freed before anything waits for the copy
            self._returned = back, event

    def on_device(self) -> torch.Tensor:
        """The bytes on the device again, safe to use on the current stream."""
        self.start_return()
        assert self._returned is not None
        back, event = self._returned
        self._streams.module.current_stream().wait_event(event)
        return back


class _Group:
    """The copies that one run of one module made."""

    def __init__(self, previous: weakref.ref[_Group] | None, window: int, leaving: deque[_Departure]) -> None:
        self._previous = previous
        self._window = window
        self._leaving = leaving
        self._copies: list[weakref.ref[_HostCopy]] = []
        self._sources: list[torch.Tensor] = []
        self._fetched_ahead = False

    def add(self, copy: _HostCopy, source: torch.Tensor) -> None:
        self._copies.append(weakref.ref(copy))
        self._sources.append(source.detach())  # held until the copy is done, or its memory could be overwritten

    def departure(self) -> _Departure | None:
        """What must stay on the device until the copies are done; None if there are none."""
        if not self._sources:
            return None
        sources, self._sources = self._sources, []
        streams = _SideStream.of(sources[0].device)
        return _Departure(sources, streams, streams.record())

    def fetch_ahead(self) -> None:
        """Begin the return of this module's copies and of those that ran before it, which the backward needs next."""
        if self._fetched_ahead:
            return
        self._fetched_ahead = True
        while self._leaving:  # the forward is over, and would not release these any more
            self._leaving.popleft().wait()
        group: _Group | None = self
        for _ in range(self._window + 1):  # bounded: what is fetched ahead takes up device memory
            if group is None:
                return
            for reference in reversed(group._copies):
                copy = reference()
                if copy is not None:
                    copy.start_return()
            group = group._previous() if group._previous else None


@dataclass(frozen=True)
class _Departure:
    """Device tensors that are being copied out."""

    sources: list[torch.Tensor]
    streams: _SideStream
    event: Any

    def has_left(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        """Let the current stream wait for the copies; after that the sources' memory may be reused."""
        self.streams.module.current_stream().wait_event(self.event)
