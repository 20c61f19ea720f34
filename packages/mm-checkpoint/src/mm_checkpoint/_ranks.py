"""The few collectives that a checkpoint needs, on objects, with or without a process group.

They run on a gloo group made for them if the default group has no CPU backend (a device-only group can't move python
objects from a background thread). An error on one rank becomes the same error on all: a rank that simply left would
keep the others waiting in the next collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mm_checkpoint.errors import CheckpointError, SaveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers; ``group`` is None for a single process."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @classmethod
    def current(cls, *, own_group: bool = False) -> Ranks:
        """All ranks of the default process group; without one, this process alone.

        Args:
            own_group: always make a new group, for use from a second thread. Collective: every rank has to call it.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        backend = dist.get_backend_config()
        has_cpu = "cpu:gloo" in str(backend) or dist.get_backend() == "gloo"
        group = dist.new_group(backend="gloo") if own_group or not has_cpu else dist.group.WORLD
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value on rank 0; an empty list on the others."""
        if self.group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T] | None) -> T:
        """Each rank's own entry of rank 0's list."""
        if self.group is None:
            assert values is not None
            return values[0]
        import torch.distributed as dist

        holder: list[Any] = [None]
        dist.scatter_object_list(holder, values, src=0, group=self.group)
        return holder[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and gather the (small) results; an error on one rank is raised on all.

        Raises:
            CheckpointError: as the first rank that failed raised it.
            SaveError: that rank raised an OSError.
            TypeError, ValueError: likewise; anything else leaves as RuntimeError.
        """
        outcome = self._try(work)
        gathered = self.all_gather(dataclasses.replace(outcome, cause=None))  # not every exception can be pickled
        self._raise_first(gathered, outcome)
        return [part.value for part in gathered]  # type: ignore[misc]  # none failed, so each has its value

    def each(self, work: Callable[[], T]) -> T:
        """Like `together`, for results that stay on their rank."""
        outcome = self._try(work)
        gathered: list[_Outcome[T]] = self.all_gather(_Outcome(None, outcome.failure))
        self._raise_first(gathered, outcome)
        return outcome.value  # type: ignore[return-value]  # it didn't fail

    @staticmethod
    def _try(work: Callable[[], T]) -> _Outcome[T]:
        try:
            return _Outcome(work(), None)
        except Exception as error:  # noqa: BLE001 - raised again on every rank
            return _Outcome(None, _portable(error), error)

    def _raise_first(self, gathered: Sequence[_Outcome[Any]], own: _Outcome[Any]) -> None:
        failed = [(rank, part.failure) for rank, part in enumerate(gathered) if part.failure is not None]
        if failed:
            rank, (kind, message) = failed[0]
            everywhere = len(failed) == self.size
            raise kind(message if everywhere else f"rank {rank}: {message}") from own.cause


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What one rank's work gave: a value, or an error in a form that every rank can raise again."""

    value: T | None
    failure: tuple[type[Exception], str] | None
    cause: Exception | None = None


def _portable(error: Exception) -> tuple[type[Exception], str]:
    if isinstance(error, CheckpointError | TypeError | ValueError):
        kind = type(error) if isinstance(error, CheckpointError) else ValueError
        return kind if not isinstance(error, TypeError) else TypeError, str(error)
    if isinstance(error, OSError):
        return SaveError, f"{error.filename or 'the disk'}: {error.strerror or error}"
    return RuntimeError, f"{type(error).__name__}: {error}"
