"""What ``parallelize`` did, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnitReport:
    """One FSDP2 unit.

    Args:
        name: of its module.
        sub_model: its root's name.
        numel: parameters it owns.
        trainable_numel: those of them that are trained.
    """

    name: str
    sub_model: str
    numel: int
    trainable_numel: int


@dataclass(frozen=True)
class SubModelReport:
    """One root.

    Args:
        name: of the sub-model; "" if the model is the only root.
        layout: how its parameters are laid out over the ranks.
        reshard_after_forward: of its units.
        cpu_offload: whether parameters live in host memory.
        forward_prefetch: unit → units it gathers ahead in the forward.
        backward_prefetch: the same in the backward.
    """

    name: str
    layout: str
    reshard_after_forward: bool | int
    cpu_offload: bool
    forward_prefetch: dict[str, list[str]] = field(default_factory=dict)
    backward_prefetch: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelReport:
    """The outcome of a plan; ``str()`` of it is a table for the log.

    Args:
        matches: pattern of ``apply_modules`` → names.
        ignored: pattern of ``ignored_modules`` → names.
        sub_models: the roots.
        units: of all roots.
        plain: module → parameters that every rank holds whole, outside the plan's dtypes.
        notes: what may surprise the plan's author.
    """

    matches: dict[str, list[str]]
    ignored: dict[str, list[str]]
    sub_models: list[SubModelReport]
    units: list[UnitReport]
    plain: dict[str, int]
    notes: list[str]

    def __str__(self) -> str:
        lines = ["parallel plan"]
        for title, found in (("pattern", self.matches), ("ignored", self.ignored)):
            lines += [f"  {title:<8} {pattern:<40} {len(names):>5} modules" for pattern, names in found.items()]
        for sub_model in self.sub_models:
            lines.append(f"  {sub_model.name or 'model'}: {sub_model.layout}")
            lines += self._unit_lines(sub_model.name)
        lines += [f"  {name}: {numel:,} parameters, plain on every rank" for name, numel in self.plain.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _unit_lines(self, sub_model: str) -> list[str]:
        """One line for each kind of unit: those whose names differ only in a number, with equal counts."""
        kinds: dict[tuple[str, int, int], int] = {}
        for unit in self.units:
            if unit.sub_model == sub_model:
                parts = ["{*}" if part.isdigit() else part for part in unit.name.split(".")]
                key = (".".join(parts), unit.numel, unit.trainable_numel)
                kinds[key] = kinds.get(key, 0) + 1
        return [
            f"    {count:>4} × {name or '(root)':<40} {numel:>14,} parameters, {_share(trained, numel)}"
            for (name, numel, trained), count in kinds.items()
        ]


def _share(trained: int, numel: int) -> str:
    if trained == numel:
        return "trained" if numel else "none of its own"
    return f"{trained:,} trained" if trained else "frozen"
