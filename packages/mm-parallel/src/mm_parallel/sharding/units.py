"""From a plan's patterns to FSDP2 units: what is wrapped, which owns which parameter. Needs no process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from mm_parallel.config import FSDPPlan, SubPlan
from mm_parallel.errors import FieldPath, PlanError, below
from mm_parallel.patterns import match_callable_modules, match_modules

_APPLY = "fsdp_plan.apply_modules"
_IGNORED = "fsdp_plan.ignored_modules"
_SUB_PLANS = "fsdp_plan.sub_plans"


@dataclass
class Unit:
    """One all-gather's worth of parameters: those below ``module`` that no other unit owns."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def trainable_numel(self) -> int:
        return sum(p.numel() for p in self.parameters.values() if p.requires_grad)


@dataclass
class SubModel:
    """One FSDP2 root and its units: the root first, outer before inner, in the order of definition."""

    name: str
    module: nn.Module
    units: list[Unit]
    plan: SubPlan

    @property
    def trainable(self) -> bool:
        return any(unit.trainable_numel for unit in self.units)


@dataclass
class ResolvedPlan:
    """What a plan means for one model.

    Args:
        matches: pattern of ``apply_modules`` → names.
        ignored: pattern of ``ignored_modules`` → names.
        sub_models: roots that are not ignored.
        notes: what may surprise the plan's author.
    """

    matches: dict[str, list[str]]
    ignored: dict[str, list[str]]
    sub_models: list[SubModel]
    notes: list[str]


def resolve_plan(model: nn.Module, plan: FSDPPlan, sub_models: Mapping[str, nn.Module] | None = None) -> ResolvedPlan:
    """Match the plan's patterns and give every parameter to exactly one unit; works on a model built on meta.

    Args:
        model: patterns are matched against its ``named_modules()``.
        plan: see :class:`FSDPPlan`.
        sub_models: by name, the modules that are each a root of their own; None makes ``model`` the only root.

    Raises:
        PatternError: a pattern that matches nothing.
        PlanError: a contradiction; the message names the modules and the fields.
    """
    roots = {"": model} if sub_models is None else dict(sub_models)
    _check_names(model, roots, plan)
    with below("apply_modules"):
        matches = match_callable_modules(model, plan.apply_modules, what=_APPLY)
    with below("ignored_modules"):
        ignored = match_modules(model, plan.ignored_modules, what=_IGNORED)
    wanted = _modules(model, matches)
    plain = {m: p for outer, p in _modules(model, ignored).items() for m in outer.modules()}
    for module, pattern in wanted.items():
        if module in plain:
            raise PlanError(
                _APPLY,
                f"{pattern!r} names {_name_of(model, module)!r}, which {_IGNORED}: {plain[module]!r} keeps plain; a "
                "module is either a unit or ignored",
                path=_place_of(pattern, plan),
            )
    notes: list[str] = []
    resolved = []
    for name, root in roots.items():
        if root not in plain:
            tree = _Tree(name, root, wanted, plain)
            notes += tree.merge_shared_modules()
            resolved.append(SubModel(name, root, tree.units(), plan.sub_plans.get(name, SubPlan())))
    _check_all_inside_roots(model, wanted, roots.values(), plan)
    for sub_model in resolved:
        for unit in sub_model.units:
            _check_unit(unit)
    _check_ownership(model, resolved)
    return ResolvedPlan(matches, ignored, resolved, notes)


class _Tree:
    """The modules of one sub-model, with the units around each of them, outermost first."""

    def __init__(self, name: str, root: nn.Module, wanted: Iterable[nn.Module], plain: Mapping[nn.Module, str]) -> None:
        self._prefix = f"{name}." if name else ""
        self._name = name
        self._root = root
        self._plain = plain
        self._unit_modules = {root} | (set(root.modules()) & set(wanted))

    def merge_shared_modules(self) -> list[str]:
        """Dissolve units until every parameter has a unit that is gathered wherever the parameter is used.

        A parameter that several units use (a tie) belongs to the innermost unit around all of its uses. FSDP2 lets
        that unit take it if one of the uses is directly in it; otherwise one of the inner units has to go.

        Returns:
            A note for each unit that was dissolved.
        """
        notes = []
        # One at a time: every unit that goes changes which unit is the innermost around other ties.
        while (found := self._first_unreachable_tie()) is not None:
            parameter, owner, inner = found
            self._unit_modules -= set(inner)
            names = ", ".join(repr(_name_of(self._root, m, self._prefix)) for m in inner)
            where = _name_of(self._root, owner, self._prefix) or "the model"
            notes.append(f"{names} merged into {where}: {parameter!r} is tied to a parameter outside")
        return notes

    def units(self) -> list[Unit]:
        """The units with their parameters; a unit that owns none is left out, unless it is the root."""
        names = {m: self._prefix + n if n else self._name for n, m in self._root.named_modules()}
        owned: dict[nn.Module, dict[str, nn.Parameter]] = {m: {} for m in names if m in self._unit_modules}
        for name, parameter, paths in self._uses():
            owned[_common(paths)[-1]][name] = parameter
        return [
            Unit(names[module], module, parameters)
            for module, parameters in owned.items()
            if parameters or module is self._root
        ]

    def _first_unreachable_tie(self) -> tuple[str, nn.Module, list[nn.Module]] | None:
        for name, _, paths in self._uses():
            owner = _common(paths)[-1]
            if all(path[-1] is not owner for path in paths):
                path = paths[0]
                return name, owner, path[path.index(owner) + 1 :]
        return None

    def _uses(self) -> list[tuple[str, nn.Parameter, list[list[nn.Module]]]]:
        """(name, parameter, for each of its uses the units around it), ignored parameters left out."""
        uses: dict[nn.Parameter, tuple[str, list[list[nn.Module]]]] = {}
        ignored = {p for module in self._plain for p in module.parameters(recurse=False)}
        for name, module, path in self._walk(self._root, self._prefix, []):
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter not in ignored:
                    uses.setdefault(parameter, (name + key, []))[1].append(path)
        return [(name, parameter, paths) for parameter, (name, paths) in uses.items()]

    def _walk(
        self, module: nn.Module, prefix: str, path: list[nn.Module]
    ) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
        if module in self._plain:
            return
        path = [*path, module] if module in self._unit_modules else path
        yield prefix, module, path
        for name, child in module.named_children():
            yield from self._walk(child, f"{prefix}{name}.", path)


def _common(paths: list[list[nn.Module]]) -> list[nn.Module]:
    """The units that are on every path, in the order of the first."""
    return [unit for unit in paths[0] if all(unit in path for path in paths)]


def _modules(model: nn.Module, matches: Mapping[str, list[str]]) -> dict[nn.Module, str]:
    """Every matched module, with the first pattern that names it."""
    found: dict[nn.Module, str] = {}
    for pattern, names in matches.items():
        for name in names:
            found.setdefault(model.get_submodule(name), pattern)
    return found


def _name_of(model: nn.Module, module: nn.Module, prefix: str = "") -> str:
    return next((prefix + name if name else prefix[:-1]) for name, m in model.named_modules() if m is module)


def _check_names(model: nn.Module, roots: Mapping[str, nn.Module], plan: FSDPPlan) -> None:
    for name, root in roots.items():
        if model.get_submodule(name) is not root:
            raise PlanError("", f"sub-model {name!r} is not the model's own attribute of that name")
        for other, inner in roots.items():
            if inner is not root and any(m is inner for m in root.modules()):
                raise PlanError("", f"sub-model {other!r} is inside sub-model {name!r}; both can't be roots")
    plan.check_sub_plans({name: _is_trained(root) for name, root in roots.items() if name})


def _is_trained(root: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in root.parameters())


def _place_of(pattern: str, plan: FSDPPlan) -> FieldPath:
    return ("apply_modules", plan.apply_modules.index(pattern))


def _check_all_inside_roots(
    model: nn.Module, wanted: Mapping[nn.Module, str], roots: Iterable[nn.Module], plan: FSDPPlan
) -> None:
    inside = {module for root in roots for module in root.modules()}
    for module, pattern in wanted.items():
        if module not in inside:
            raise PlanError(
                _APPLY,
                f"{pattern!r} names {_name_of(model, module)!r}, which is in no sub-model",
                path=_place_of(pattern, plan),
            )


def _check_unit(unit: Unit) -> None:
    dtypes: dict[object, str] = {}  # a unit's gradients are reduced in one buffer, which has one dtype
    for name, parameter in unit.parameters.items():
        if parameter.ndim == 0:
            raise PlanError(name, "a parameter without dimensions can't be sharded; give it the shape (1,)")
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        shown = ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise PlanError(
            f"unit {unit.name!r}",
            f"its trainable parameters have different dtypes ({shown}); "
            "cast them to one (compute dtype is the plan's param_dtype, not theirs)",
        )


def _check_ownership(model: nn.Module, sub_models: Iterable[SubModel]) -> None:
    owner: dict[nn.Parameter, str] = {}
    for sub_model in sub_models:
        for unit in sub_model.units:
            for name, parameter in unit.parameters.items():
                if parameter in owner:
                    raise PlanError(
                        "", f"{name} is tied to {owner[parameter]}, in another sub-model: roots can't share"
                    )
                owner[parameter] = name
    # FSDP2 reduces only what its units own: outside them, every rank would train a copy of its own, silently.
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in owner:
            raise PlanError(
                "",
                f"{name} is trainable, but belongs to no unit (it is ignored, or outside every sub-model): its "
                "gradients would not be reduced; freeze it or shard it",
            )
