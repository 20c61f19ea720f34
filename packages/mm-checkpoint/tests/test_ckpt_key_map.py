"""Key maps, tensor ops, and what reading through them gives."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_checkpoint import Concat, KeyMap, Split, Transpose, convert, find_source, get_key_map, list_key_maps
from mm_checkpoint._tensors.box import Box
from mm_checkpoint._tensors.mapped import apply_key_map
from mm_checkpoint._tensors.source import read_box
from mm_checkpoint.errors import KeyMapError


def test_templates_both_ways() -> None:
    """The exact table comes before rules, the first rule that fits counts, dropped names have no counterpart."""
    key_map = KeyMap(
        "m",
        exact={"a.0.w": "first"},
        rules=[("a.{n}.{p}", "b.{n}.{p}"), ("a.{rest*}", "c.{rest*}")],
        dropped=["{any*}._extra_state"],
    )
    for source, native in {"a.0.w": "first", "a.1.w": "b.1.w", "a.x.y.z": "c.x.y.z"}.items():
        assert key_map.to_native(source) == native
        assert key_map.to_source(native) == source
    assert key_map.to_native("a.1._extra_state") is None
    with pytest.raises(KeyMapError, match="no rule covers source name zzz"):
        key_map.to_native("zzz")


def test_norms_that_change_their_number() -> None:
    """B005 (the table). diffusers' norm2 is the release's norm3: it comes out there, and back again."""
    key_map = KeyMap("m", rules=[("blocks.{n}.norm2.{p}", "blocks.{n}.norm3.{p}")])
    assert key_map.rename_all(["blocks.0.norm2.weight"], to="native") == {
        "blocks.0.norm2.weight": "blocks.0.norm3.weight"
    }
    match = r"no rule covers 1 name\(s\): blocks.0.norm3.weight; nearest rule: blocks.\{n\}.norm2.\{p\}"
    with pytest.raises(KeyMapError, match=match):
        key_map.rename_all(["blocks.0.norm3.weight"], to="native")


def test_not_one_to_one() -> None:
    """Two names that collide, and one that does not come back, are errors with the names."""
    two = KeyMap("m", rules=[("a.{p}", "c.{p}"), ("b.{p}", "c.{p}")])
    with pytest.raises(KeyMapError, match=r"a\.w and b\.w both become c\.w"):
        two.rename_all(["a.w", "b.w"], to="native")
    with pytest.raises(KeyMapError, match=r"b\.w becomes c\.w, which would come back as a\.w"):
        two.rename_all(["b.w"], to="native")
    with pytest.raises(KeyMapError, match="two exact entries lead to one native name"):
        KeyMap("m", exact={"a": "c", "b": "c"})
    with pytest.raises(KeyMapError, match="use different placeholders"):
        KeyMap("m", rules=[("a.{n}", "b.{m}")])
    with pytest.raises(KeyMapError, match="template"):
        KeyMap("m", rules=[("a.{n}.{n}", "b.{n}.{n}")])


OPS = KeyMap(
    "ops",
    rules=[("keep.{p}", "kept.{p}")],
    ops=[
        Split("{n}.qkv", ("{n}.q", "{n}.k", "{n}.v"), sizes=(4, 2, 2)),
        Concat(("{n}.gate", "{n}.up"), "{n}.gate_up", dim=1),
        Transpose("{n}.conv", "{n}.linear"),
        Transpose("{n}.deep", "{n}.deep_t", dims=(0, 2)),
    ],
)


def op_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "0.qkv": torch.randn(8, 3),
        "0.gate": torch.randn(5, 4),
        "0.up": torch.randn(5, 4),
        "0.conv": torch.randn(6, 2),
        "0.deep": torch.randn(2, 3, 4),
        "keep.weight": torch.randn(3),
    }


def test_ops_and_their_inverse(tmp_path: Path) -> None:
    """B007. Split, concat and transpose give views; each file entry has exactly its own size; the way back is exact."""
    source = op_tensors()
    save_file(source, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "native", to="hf", key_map=OPS)
    native = load_file(tmp_path / "native" / "model.safetensors")
    q, k, v = source["0.qkv"].split([4, 2, 2])
    expected = {"0.q": q, "0.k": k, "0.v": v, "0.linear": source["0.conv"].t(), "kept.weight": source["keep.weight"]}
    expected |= {"0.gate_up": torch.cat([source["0.gate"], source["0.up"]], 1)}
    expected |= {"0.deep_t": source["0.deep"].transpose(0, 2)}
    toys.assert_same(native, expected)
    size = (tmp_path / "native" / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "native" / "model.safetensors").read_bytes()[:8], "little")
    assert size == 8 + header + sum(tensor.nbytes for tensor in expected.values())
    convert(tmp_path / "native", tmp_path / "back", to="diffusers", key_map=OPS)
    toys.assert_same(toys.read_all(tmp_path / "back"), source)


def test_any_box_through_ops(tmp_path: Path) -> None:
    """Every small box of every mapped tensor equals the slice of the whole: what a shard of any mesh may ask for."""
    save_file(op_tensors(), tmp_path / "a.safetensors")
    mapped = apply_key_map(find_source(tmp_path / "a.safetensors").open(), OPS, to="native")
    for name, info in mapped.tensors.items():
        whole = read_box(mapped, name)
        for start in range(info.shape[0]):
            offsets = tuple(min(start, size - 1) for size in info.shape)
            sizes = tuple(min(2, size - o) for size, o in zip(info.shape, offsets, strict=True))
            box = Box(offsets, sizes)
            assert torch.equal(read_box(mapped, name, box), whole[box.slices]), (name, box)


@pytest.mark.parametrize(
    ("ops", "tensors", "match"),
    [
        ([Split("a", ("b", "c"))], {"a": (3, 2)}, "can't be cut along dim 0 into 2 parts"),
        ([Split("a", ("b", "c"), sizes=(1, 1))], {"a": (3,)}, r"of sizes \(1, 1\)"),
        ([Concat(("a", "b"), "c")], {"a": (3, 2)}, "a can't be joined without b"),
        ([Concat(("a", "b"), "c")], {"a": (3, 2), "b": (3, 3)}, r"can't join along dim 0: a \[3, 2\]"),
        ([Transpose("a", "b")], {"a": (3,)}, r"has no dims \(0, 1\) to swap"),
    ],
)
def test_ops_that_do_not_fit(tmp_path: Path, ops: Any, tensors: Any, match: str) -> None:
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(KeyMapError, match=match):
        apply_key_map(find_source(tmp_path / "a.safetensors").open(), KeyMap("m", ops=ops), to="native")


def test_names_from_an_op_may_not_collide(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 1), "x": torch.zeros(2, 1)}, tmp_path / "a.safetensors")
    key_map = KeyMap("m", ops=[Transpose("a", "b"), Transpose("x", "b")])
    with pytest.raises(KeyMapError, match="come from two places: b"):
        apply_key_map(find_source(tmp_path / "a.safetensors").open(), key_map, to="native")


def fake_entry_points(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    from mm_checkpoint import key_map

    group = key_map.ENTRY_POINT_GROUP
    found = [EntryPoint(name, value, group) for name, value in entries]
    monkeypatch.setattr(key_map, "entry_points", lambda group: found)


def test_key_maps_come_from_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by name; unknown, doubly claimed, unimportable and wrong ones say so."""
    fake_entry_points(
        monkeypatch,
        ("ckpt_toy", "ckpt_helpers:KEY_MAP"),
        ("twice", "ckpt_helpers:KEY_MAP"),
        ("twice", "ckpt_helpers:OTHER"),
        ("gone", "no_such_module:MAP"),
        ("wrong", "ckpt_helpers:Toy"),
    )
    assert list_key_maps() == ["ckpt_toy", "gone", "twice", "wrong"]
    assert get_key_map("ckpt_toy") is toys.KEY_MAP
    with pytest.raises(KeyMapError, match="installed: ckpt_toy, gone, twice, wrong.* did you mean ckpt_toy"):
        get_key_map("ckpt_toi")
    with pytest.raises(KeyMapError, match="claimed by several distributions"):
        get_key_map("twice")
    with pytest.raises(KeyMapError, match="can't be imported: No module named 'no_such_module'"):
        get_key_map("gone")
    with pytest.raises(KeyMapError, match="is a type, not a KeyMap"):
        get_key_map("wrong")
