"""What became of the rows of a data set: nothing is left out silently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mm_trainer.contracts.dataset import MapDataset

SHOWN = 3
"""Names that a message lists per reason."""


@dataclass
class Skipped:
    """Rows left out for one reason."""

    reason: str
    bad: bool
    """True for broken files, which count towards ``max_bad_fraction``; False for rows that a rule leaves out."""
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        self.count += 1
        if len(self.examples) < SHOWN:
            self.examples.append(where)


@dataclass
class DataReport:
    """Rows of a data set: how many there are, and which were left out and why.

    ``skipped`` maps a reason to the rows left out for it.
    """

    rows: int
    skipped: dict[str, Skipped] = field(default_factory=dict)

    def skip(self, where: str, reason: str, *, bad: bool) -> None:
        self.skipped.setdefault(reason, Skipped(reason, bad)).add(where)

    def absorb(self, entry: Skipped) -> None:
        """Add what another data set left out for one reason."""
        own = self.skipped.setdefault(entry.reason, Skipped(entry.reason, entry.bad))
        own.count += entry.count
        own.examples = [*own.examples, *entry.examples][:SHOWN]

    @property
    def usable(self) -> int:
        return self.rows - sum(entry.count for entry in self.skipped.values())

    @property
    def bad(self) -> int:
        """Rows whose file is broken."""
        return sum(entry.count for entry in self.skipped.values() if entry.bad)

    def lines(self) -> list[str]:
        """One line per reason: ``3 of 4 skipped: too short for 81 frames: a.mp4 (9 frames), …``."""
        out = []
        for entry in self.skipped.values():
            more = f" and {entry.count - len(entry.examples)} more" if entry.count > len(entry.examples) else ""
            out.append(f"{entry.count} of {self.rows} skipped: {entry.reason}: {', '.join(entry.examples)}{more}")
        return out


@runtime_checkable
class Reporting(Protocol):
    """A data set that left rows out when it was opened and says which."""

    @property
    def report(self) -> DataReport: ...


@runtime_checkable
class Naming(Protocol):
    """A data set that can say in words which sample one is, such as its file."""

    def name(self, index: int) -> str: ...


@runtime_checkable
class CountsSlowReads(Protocol):
    """A data set that reads some samples the slow way, such as clips whose times can't be trusted."""

    @property
    def slow_reads(self) -> int:
        """How many so far, in this process."""
        ...


def copy_report(dataset: MapDataset) -> DataReport:
    """A data set's report, to add to; empty for one that doesn't report."""
    own = dataset.report if isinstance(dataset, Reporting) else DataReport(rows=len(dataset))
    report = DataReport(rows=own.rows)
    for entry in own.skipped.values():
        report.absorb(entry)
    return report
