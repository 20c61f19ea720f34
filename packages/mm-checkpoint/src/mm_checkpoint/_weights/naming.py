"""Which names a file uses: the module's own, those under a prefix, or a key map's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mm_checkpoint._tensors.mapped import apply_key_map, rename, strip_prefix
from mm_checkpoint._tensors.source import TensorInfo, TensorSource
from mm_checkpoint.errors import KeyMapError, WeightMismatchError, nearest, sample
from mm_checkpoint.key_map import KeyMap

# Single-file packs put the model under one of these. Nothing else is stripped automatically: a prefix that nobody
# declared is an error, not a guess.
PACK_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_STATE_SECTION = "model."


@dataclass(frozen=True)
class Wanted:
    """What a module needs from a file.

    Attributes:
        shapes: every persistent parameter and buffer, with its global shape.
        ties: for each of these names, all names of the same tensor (itself included).
        optional: names that may be missing.
        ignorable: names that a file may hold and a module recomputes (non-persistent buffers).
    """

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, tuple[str, ...]]
    optional: Collection[str]
    ignorable: Collection[str]


@dataclass(frozen=True)
class Naming:
    """A way to read a file's names: through a key map or as they are, below a prefix or from the start."""

    key_map: str | None
    prefix: str

    def __str__(self) -> str:
        names = "names as they are" if self.key_map is None else f"key map {self.key_map!r}"
        return f"{names} under {self.prefix!r}" if self.prefix else names


@dataclass(frozen=True)
class Reading:
    """One way to read a file's names, and how well it fits.

    Attributes:
        naming: the way.
        source: the file's tensors in the module's names.
        missing, unexpected: what doesn't fit; ``unexpected`` also has the names that a key map doesn't cover.
        dropped: the file's names that the key map leaves out or the module recomputes.
    """

    naming: Naming
    source: TensorSource
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: tuple[str, ...]
    matched: int

    @property
    def fits(self) -> bool:
        return not self.missing and not self.unexpected


def choose_reading(
    source: TensorSource, wanted: Wanted, *, form: str, key_map: KeyMap | None, prefix: str | None, origin: str
) -> Reading:
    """The first way of reading ``source`` that covers exactly what is wanted, shapes included.

    Names are tried as they are, then through ``key_map`` (in the opposite order if ``form`` is ``diffusers``), each
    also under the prefixes that such a file may have.

    Raises:
        WeightMismatchError: no way fits; counts, names and nearest matches are those of the closest way.
        WeightMismatchError: several prefixes fit (a run with two equal sub-models): ``prefix`` has to say which.
        KeyMapError: the map isn't one-to-one on these names.
    """
    readings: list[Reading] = []
    problems: list[KeyMapError] = []
    for part, candidate, naming in _candidates(source, wanted, form=form, key_map=key_map, prefix=prefix):
        try:
            readings.append(_read(part, wanted, candidate, naming))
        except KeyMapError as error:  # raised below, unless another way of reading fits
            problems.append(error)
    fitting = [reading for reading in readings if reading.fits]
    if problems and not fitting:
        raise problems[0]
    if len({reading.naming.prefix for reading in fitting}) > 1:
        places = ", ".join(str(reading.naming) for reading in fitting)
        raise WeightMismatchError(f"{origin}: several sub-models fit: {places}; say which by its prefix")
    chosen = fitting[0] if fitting else max(readings, key=lambda r: (r.matched, -len(r.unexpected)))
    wrong = _wrong_shapes(chosen.source.tensors, wanted)
    if not chosen.fits or wrong:
        raise WeightMismatchError(_explain(chosen, wrong, origin))
    return chosen


def _candidates(
    source: TensorSource, wanted: Wanted, *, form: str, key_map: KeyMap | None, prefix: str | None
) -> Iterator[tuple[TensorSource, KeyMap | None, Naming]]:
    """The tensors under a prefix, the map to read their names with, and a name for the two."""
    maps: list[KeyMap | None] = [None] if key_map is None else [None, key_map]
    if form == "diffusers":
        maps.reverse()
    for start in _prefixes(source.tensors, form, wanted) if prefix is None else [prefix]:
        inner = strip_prefix(source, start) if start else source
        for candidate in maps:
            yield inner, candidate, Naming(None if candidate is None else candidate.name, start)


def _prefixes(names: Collection[str], form: str, wanted: Wanted) -> list[str]:
    if form != "dcp":
        return ["", *(prefix for prefix in PACK_PREFIXES if any(name.startswith(prefix) for name in names))]
    inner = [name.removeprefix(_STATE_SECTION).partition(".")[0] for name in names if name.startswith(_STATE_SECTION)]
    # A model that was trained inside a wrapper stands below the wrapper's name for it, wherever that is.
    around: list[str] = []
    for wished in sorted(wanted.shapes.keys() - set(wanted.optional), key=len, reverse=True):
        around = [n.removesuffix(wished) for n in names if n.startswith(_STATE_SECTION) and n.endswith(f".{wished}")]
        if around:  # a tied tensor may be there under its other name only
            break
    sub_models = [f"{_STATE_SECTION}{sub}." for sub in inner]
    return list(dict.fromkeys(["", *([_STATE_SECTION] if inner else []), *sub_models, *around]))


def _read(source: TensorSource, wanted: Wanted, key_map: KeyMap | None, naming: Naming) -> Reading:
    stored = source.tensors
    uncovered: set[str] = set()
    native = source
    if key_map is not None:
        uncovered = set(key_map.uncovered(stored, to="native"))
        covered = rename(source, {name: name for name in stored if name not in uncovered}) if uncovered else source
        native = apply_key_map(covered, key_map, to="native")
    names = native.tensors.keys()
    surplus = names - wanted.shapes.keys()
    ignored = surplus & set(wanted.ignorable)
    present = names & wanted.shapes.keys()
    missing = [
        name
        for name in wanted.shapes
        if name not in present and name not in wanted.optional and present.isdisjoint(wanted.ties[name])
    ]
    dropped = [] if key_map is None else _dropped(key_map, stored, uncovered)
    return Reading(
        naming,
        rename(native, {name: name for name in native.tensors if name in present}) if surplus else native,
        tuple(missing),
        tuple(sorted([*(surplus - ignored), *uncovered])),
        tuple(sorted([*ignored, *dropped])),
        len(present),
    )


def _dropped(key_map: KeyMap, names: Collection[str], uncovered: Collection[str]) -> list[str]:
    result = []
    for name in names:
        try:
            if name not in uncovered and key_map.to_native(name) is None:
                result.append(name)
        except KeyMapError:  # takes part in a tensor op, so it isn't dropped
            continue
    return result


def _wrong_shapes(stored: Mapping[str, TensorInfo], wanted: Wanted) -> list[str]:
    return [
        f"{name} is {list(info.shape)} in {info.file}, {list(wanted.shapes[name])} here"
        for name, info in stored.items()
        if name in wanted.shapes and info.shape != tuple(wanted.shapes[name])
    ]


def _explain(reading: Reading, wrong: list[str], origin: str) -> str:
    lines = [
        f"{origin} doesn't fit (read with {reading.naming}): {reading.matched} name(s) matched, {len(reading.missing)} "
        f"missing, {len(reading.unexpected)} unexpected, {len(wrong)} of another shape"
    ]
    if reading.missing:
        lines.append(f"missing: {sample(reading.missing)}")
        for name in sorted(reading.missing)[:3]:
            hint = nearest(name, reading.unexpected, 1)
            lines += [f"  nearest to {name} in the file: {hint[0]}"] if hint else []
    if reading.unexpected:
        lines.append(f"unexpected: {sample(reading.unexpected)}")
    if wrong:
        lines.append(
            f"shapes: {'; '.join(sorted(wrong)[:5])}" + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        )
    return "\n  ".join(lines)


def compact_dtypes(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Element types by name, with the most common one once, under ``*``."""
    counts = Counter(info.dtype for info in tensors.values())
    if not counts:
        return {}
    common = counts.most_common(1)[0][0]
    return {"*": common, **{name: info.dtype for name, info in tensors.items() if info.dtype != common}}
