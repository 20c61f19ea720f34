"""A source seen through other names: prefixes, key maps in either direction, tensor ops.

Renaming, splitting, joining and transposing all come down to one thing: a tensor on our side is made of boxes of
tensors on the other. Any box of it can therefore be read without reading, or building, anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.source import TensorInfo, TensorSource
from mm_checkpoint.errors import KeyMapError, sample
from mm_checkpoint.key_map import Concat, KeyMap, Split, TensorOp, Transpose, _template

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """``box`` of our tensor is the box at ``origin`` of ``key`` (counted after its dims are permuted by ``dims``)."""

    key: str
    box: Box
    origin: tuple[int, ...]
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Mapped:
    """One tensor on our side, and the parts it is made of."""

    info: TensorInfo
    parts: tuple[Part, ...]


class MappedSource:
    """`TensorSource` with other names and layouts than the one it reads from."""

    def __init__(self, source: TensorSource, mapped: Mapping[str, Mapped]) -> None:
        self._source = source
        self._mapped = mapped
        self.tensors = {name: entry.info for name, entry in mapped.items()}

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def origin(self, name: str) -> str:
        """The (first) tensor that ``name`` is made of, by its stored name."""
        return self._mapped[name].parts[0].key

    def read_into(self, key: str, box: Box, out: torch.Tensor) -> None:
        for part in self._mapped[key].parts:
            common = box.intersect(part.box) if box.sizes else box
            if common is None:
                continue
            wanted = common.relative_to(part.box.offsets).moved(part.origin)
            target = out[common.relative_to(box.offsets).slices]
            if part.dims is None and target.is_contiguous():
                self._source.read_into(part.key, wanted, target)
                continue
            inverse = None if part.dims is None else sorted(range(len(part.dims)), key=part.dims.__getitem__)
            stored = wanted if inverse is None else wanted.permuted(inverse)
            buffer = out.new_empty(stored.sizes)
            self._source.read_into(part.key, stored, buffer)
            target.copy_(buffer if part.dims is None else buffer.permute(part.dims))

    def close(self) -> None:
        self._source.close()


def rename(source: TensorSource, names: Mapping[str, str]) -> MappedSource:
    """``source`` under new names (stored name to new name); names that aren't listed are hidden."""
    mapped = {}
    for old, new in names.items():
        info = source.tensors[old]
        mapped[new] = Mapped(info, (Part(old, Box.full(info.shape), (0,) * len(info.shape)),))
    return MappedSource(source, mapped)


def strip_prefix(source: TensorSource, prefix: str) -> MappedSource:
    """Only the tensors whose names start with ``prefix``, without it."""
    return rename(source, {name: name.removeprefix(prefix) for name in source.tensors if name.startswith(prefix)})


def apply_key_map(source: TensorSource, key_map: KeyMap, *, to: str) -> MappedSource:
    """``source`` in native (``to="native"``) or source (``to="source"``) names and layouts.

    Raises:
        KeyMapError: a name that no rule covers, two that collide, an incomplete group of tensors to join, or a shape
            that can't be cut as the map says.
    """
    try:
        return _apply(source, key_map, to)
    except KeyMapError as error:
        raise KeyMapError(f"{source.path}: {error}") from error


def _apply(source: TensorSource, key_map: KeyMap, to: str) -> MappedSource:
    side = 0 if to == "native" else 1
    rest = dict(source.tensors)
    mapped: dict[str, Mapped] = {}
    for op in key_map.ops:
        for group in _groups(key_map, op, side, rest):
            made = _apply_op(key_map, op, group, side)
            _add(key_map, mapped, made)
            for key in group.keys:
                del rest[key]
    renamed = rename(source, key_map.rename_all(rest, to=to))
    _add(key_map, mapped, renamed._mapped)
    return MappedSource(source, mapped)


def _add(key_map: KeyMap, mapped: dict[str, Mapped], more: Mapping[str, Mapped]) -> None:
    clash = mapped.keys() & more.keys()
    if clash:
        raise KeyMapError(f"key map {key_map.name}: {len(clash)} name(s) come from two places: {sample(clash)}")
    mapped.update(more)


@dataclass(frozen=True)
class _Group:
    """The input tensors of one application of an op, and the names of its outputs."""

    keys: tuple[str, ...]
    infos: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]


def _groups(key_map: KeyMap, op: TensorOp, side: int, infos: Mapping[str, TensorInfo]) -> list[_Group]:
    inputs, outputs = op.sides[side], op.sides[1 - side]
    found: dict[tuple[tuple[str, str], ...], dict[int, str]] = {}
    for key in infos:
        for position, text in enumerate(inputs):
            groups = _template(text).match(key)
            if groups is not None:
                found.setdefault(tuple(sorted(groups.items())), {})[position] = key
                break
    result = []
    for place, members in found.items():
        stands_for = dict(place)
        filled = [_template(text).fill(stands_for) for text in inputs]
        missing = [name for position, name in enumerate(filled) if position not in members]
        if missing:
            raise KeyMapError(
                f"key map {key_map.name}: {sample(members.values())} can't be joined without {sample(missing)}"
            )
        keys = tuple(members[position] for position in range(len(inputs)))
        names = tuple(_template(text).fill(stands_for) for text in outputs)
        result.append(_Group(keys, tuple(infos[key] for key in keys), names))
    return result


def _apply_op(key_map: KeyMap, op: TensorOp, group: _Group, side: int) -> dict[str, Mapped]:
    if isinstance(op, Transpose):
        return _transpose(key_map, op, group)
    divides = isinstance(op, Split) == (side == 0)
    return _divide(key_map, op, group) if divides else _join(key_map, op, group)


def _transpose(key_map: KeyMap, op: Transpose, group: _Group) -> dict[str, Mapped]:
    info = group.infos[0]
    dims = list(range(len(info.shape)))
    try:
        dims[op.dims[0]], dims[op.dims[1]] = dims[op.dims[1]], dims[op.dims[0]]
    except IndexError:
        message = f"key map {key_map.name}: {group.keys[0]} of shape {info.shape} has no dims {op.dims} to swap"
        raise KeyMapError(message) from None
    shape = tuple(info.shape[d] for d in dims)
    part = Part(group.keys[0], Box.full(shape), (0,) * len(shape), tuple(dims))
    return {group.outputs[0]: Mapped(replace(info, shape=shape, storage=None), (part,))}


def _divide(key_map: KeyMap, op: Split | Concat, group: _Group) -> dict[str, Mapped]:
    info, count = group.infos[0], len(group.outputs)
    length = info.shape[op.dim] if len(info.shape) > op.dim else 0
    sizes = op.sizes or (length // count,) * count
    if sum(sizes) != length or len(sizes) != count:
        raise KeyMapError(
            f"key map {key_map.name}: {group.keys[0]} of shape {info.shape} can't be cut along dim {op.dim} "
            f"into {count} parts" + (f" of sizes {op.sizes}" if op.sizes else "")
        )
    result, start = {}, 0
    for name, size in zip(group.outputs, sizes, strict=True):
        shape = (*info.shape[: op.dim], size, *info.shape[op.dim + 1 :])
        origin = tuple(start if d == op.dim else 0 for d in range(len(shape)))
        result[name] = Mapped(replace(info, shape=shape, storage=None), (Part(group.keys[0], Box.full(shape), origin),))
        start += size
    return result


def _join(key_map: KeyMap, op: Split | Concat, group: _Group) -> dict[str, Mapped]:
    first = group.infos[0]
    rest_of = [(info.shape[: op.dim], info.shape[op.dim + 1 :], len(info.shape), info.dtype) for info in group.infos]
    lengths = [info.shape[op.dim] if len(info.shape) > op.dim else 0 for info in group.infos]
    if len(set(rest_of)) != 1 or not all(lengths) or (op.sizes and tuple(lengths) != tuple(op.sizes)):
        shapes = ", ".join(
            f"{key} {list(info.shape)} {info.dtype}" for key, info in zip(group.keys, group.infos, strict=True)
        )
        raise KeyMapError(f"key map {key_map.name}: can't join along dim {op.dim}: {shapes}")
    shape = (*first.shape[: op.dim], sum(lengths), *first.shape[op.dim + 1 :])
    parts, start = [], 0
    for key, info in zip(group.keys, group.infos, strict=True):
        offsets = tuple(start if d == op.dim else 0 for d in range(len(shape)))
        parts.append(Part(key, Box(offsets, info.shape), (0,) * len(shape)))
        start += info.shape[op.dim]
    files = ", ".join(sorted({info.file for info in group.infos}))
    return {group.outputs[0]: Mapped(replace(first, shape=shape, file=files, storage=None), tuple(parts))}
