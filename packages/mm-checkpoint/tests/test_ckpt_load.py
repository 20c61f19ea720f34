"""Filling one process's module: ties, casts, buffers, what may be missing, what is reported."""

from __future__ import annotations

from pathlib import Path

import ckpt_helpers as toys
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mm_checkpoint import CheckpointManager, KeyMap, Split, load_weights
from mm_checkpoint._tensors.box import Box, runs
from mm_checkpoint._tensors.source import bytes_of
from mm_checkpoint.errors import BadInputError, KeyMapError, WeightMismatchError


def test_report_says_what_was_done(tmp_path: Path) -> None:
    model = toys.make_toy()
    source = toys.write_source(tmp_path / "src", toys.as_source(model))
    loaded = toys.make_toy(seed=2)
    report = load_weights(loaded, source, key_map=toys.KEY_MAP)
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert report.loaded == 10
    assert report.bytes_read == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert report.source_dtypes == {"*": "float32"}
    assert report.naming == "key map 'ckpt_toy'"
    assert str(source) in report.summary()


def test_padding_rows_are_kept(tmp_path: Path) -> None:
    """An Embedding with padding_idx keeps the row that the file has there."""
    tensors = toys.as_source(toys.make_toy())
    tensors["embed.weight"] += 5.0
    model = toys.make_toy()
    load_weights(model, toys.write_source(tmp_path / "src", tensors), key_map=toys.KEY_MAP)
    assert torch.equal(model.token.weight[0], torch.full((10,), 5.0))


def test_non_persistent_buffers_keep_their_values(tmp_path: Path) -> None:
    """They are not in the file and not touched; a file that has them all the same is no error, but it is reported."""
    tensors = {**toys.make_toy().state_dict(), "table": torch.zeros(4)}
    save_file(tensors, tmp_path / "a.safetensors")
    model = toys.make_toy()
    report = load_weights(model, tmp_path / "a.safetensors")
    assert torch.equal(model.table, torch.arange(4.0))
    assert report.dropped == ("table",)


def test_casts_are_reported_and_never_cross_kinds(tmp_path: Path) -> None:
    model = toys.make_toy()
    source = toys.write_source(tmp_path / "src", toys.as_source(model))
    half = toys.make_toy(seed=4).bfloat16()
    report = load_weights(half, source, key_map=toys.KEY_MAP)
    assert report.casts == {"float32 -> bfloat16": 10}
    assert "10 cast float32 -> bfloat16" in report.summary()
    toys.assert_same(dict(half.state_dict()), {n: t.bfloat16() for n, t in model.state_dict().items()})
    tensors = {**model.state_dict(), "scale": torch.tensor(2)}
    save_file(tensors, tmp_path / "ints.safetensors")
    with pytest.raises(WeightMismatchError, match="scale is int64, which can't be cast to the module's float32"):
        load_weights(toys.make_toy(), tmp_path / "ints.safetensors")


def test_ties(tmp_path: Path) -> None:
    """B006 (reading). Either name of a tied tensor will do; two that differ in the file are an error."""
    model = toys.make_toy(tied=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for absent in ("head.weight", "token.weight"):
        save_file({n: t for n, t in tensors.items() if n != absent}, tmp_path / "one.safetensors")
        loaded = toys.make_toy(seed=7, tied=True)
        report = load_weights(loaded, tmp_path / "one.safetensors")
        toys.assert_same(dict(loaded.state_dict()), tensors)
        assert list(report.ties) == [absent]
        assert loaded.head.weight is loaded.token.weight
    save_file(tensors, tmp_path / "both.safetensors")
    assert load_weights(toys.make_toy(tied=True), tmp_path / "both.safetensors").ties == {}
    save_file({**tensors, "head.weight": tensors["head.weight"] + 1}, tmp_path / "differ.safetensors")
    with pytest.raises(WeightMismatchError, match="are one tensor here, but differ in the file"):
        load_weights(toys.make_toy(tied=True), tmp_path / "differ.safetensors")
    save_file({n: t for n, t in tensors.items() if n[:4] not in ("head", "toke")}, tmp_path / "none.safetensors")
    with pytest.raises(WeightMismatchError, match="2 missing"):
        load_weights(toys.make_toy(tied=True), tmp_path / "none.safetensors")


def test_allowed_to_be_missing(tmp_path: Path) -> None:
    """Names and patterns; a tensor that stays as it was is named in the report; a dead pattern is an error."""
    tensors = toys.make_toy().state_dict()
    save_file({n: t for n, t in tensors.items() if not n.startswith("head")}, tmp_path / "a.safetensors")
    model = toys.make_toy(seed=3)
    before = model.head.weight.clone()
    report = load_weights(model, tmp_path / "a.safetensors", allow_missing=["head.*"])
    assert report.missing == ("head.weight",)
    assert "left as they were: head.weight" in report.summary()
    assert torch.equal(model.head.weight, before)
    with pytest.raises(BadInputError, match=r"'heat\.\*' matches no parameter or buffer; nearest: head.weight"):
        load_weights(model, tmp_path / "a.safetensors", allow_missing=["heat.*"])


def test_shapes_are_compared(tmp_path: Path) -> None:
    save_file({**toys.make_toy().state_dict(), "norm.weight": torch.ones(11)}, tmp_path / "a.safetensors")
    match = r"1 of another shape[\s\S]*norm.weight is \[11\] in a.safetensors, \[10\]"
    with pytest.raises(WeightMismatchError, match=match):
        load_weights(toys.make_toy(), tmp_path / "a.safetensors")


def test_meta_tensors_are_an_error(tmp_path: Path) -> None:
    save_file(toys.make_toy().state_dict(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = toys.Toy()
    with pytest.raises(BadInputError, match="10 of 10 tensors are on meta"):
        load_weights(model, tmp_path / "a.safetensors")


def test_non_contiguous_targets(tmp_path: Path) -> None:
    """A channels-last weight keeps its memory format."""
    model = nn.Conv2d(4, 6, 3)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    target = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    load_weights(target, tmp_path / "a.safetensors")
    toys.assert_same(dict(target.state_dict()), tensors)
    assert target.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float64, torch.float8_e4m3fn]
)
def test_element_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever a buffer may be, bit for bit: safetensors and DCP, scalars and empty tensors too."""
    values = [(torch.arange(6).reshape(2, 3) % 2).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 3).to(dtype)]

    def make(fill: list[torch.Tensor]) -> nn.Module:
        module = nn.Module()
        for i, value in enumerate(fill):
            module.register_buffer(f"b{i}", value.clone())
        return module

    save_file(dict(make(values).state_dict()), tmp_path / "a.safetensors")
    CheckpointManager(tmp_path / "run").save(1, {"model": make(values).state_dict()})
    for source in (tmp_path / "a.safetensors", tmp_path / "run"):
        module = make([torch.ones(value.shape).to(dtype) for value in values])
        load_weights(module, source)
        for i, value in enumerate(values):
            found = getattr(module, f"b{i}")
            assert found.dtype == dtype
            assert bytes(bytes_of(found)) == bytes(bytes_of(value))


def test_a_run_that_trained_it_inside_a_wrapper_as_a_weight_source(tmp_path: Path) -> None:
    """Found at whatever depth, beside what the wrapper added."""
    model = toys.make_toy()
    inside = {f"predictor.wrapped.net.{n}": t for n, t in model.state_dict().items()}
    CheckpointManager(tmp_path / "run").save(3, {"model": {**inside, "predictor.head.weight": torch.ones(2)}})
    loaded = toys.make_toy(seed=2)
    report = load_weights(loaded, tmp_path / "run")
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert report.naming == "names as they are under 'model.predictor.wrapped.net.'"
    loaded.an_adapter_whose_names_are_longer_than_all_others = torch.nn.Linear(2, 2)
    load_weights(loaded, tmp_path / "run", allow_missing=["an_adapter_*"])


def test_a_run_as_a_weight_source(tmp_path: Path) -> None:
    """A training run's folder: the sub-model is found under its prefix; two that fit have to be told apart."""
    model = toys.make_toy()
    state = {"model": {f"low.{n}": t for n, t in model.state_dict().items()}, "train": {"step": 3}}
    CheckpointManager(tmp_path / "one").save(3, state)
    loaded = toys.make_toy(seed=2)
    report = load_weights(loaded, tmp_path / "one")
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert report.naming == "names as they are under 'model.low.'"
    other = {f"high.{n}": t + 1 for n, t in model.state_dict().items()}
    CheckpointManager(tmp_path / "two").save(3, {"model": {**state["model"], **other}})
    with pytest.raises(WeightMismatchError, match=r"several sub-models fit: .*'model.low.'.*'model.high.'"):
        load_weights(loaded, tmp_path / "two")
    load_weights(loaded, tmp_path / "two", prefix="model.high.")
    assert torch.equal(loaded.head.weight, model.head.weight + 1)


def test_a_map_that_fails_only_counts_where_nothing_else_fits(tmp_path: Path) -> None:
    """Native names beside a map that can't read them: no error; the same map on names that need it: its own error."""
    key_map = KeyMap("bad", rules=[("{x*}", "{x*}")], ops=[Split("head.weight", ("a", "b"))])
    save_file(toys.make_toy().state_dict(), tmp_path / "native.safetensors")
    load_weights(toys.make_toy(), tmp_path / "native.safetensors", key_map=key_map)
    save_file({"head.weight": torch.zeros(13, 10)}, tmp_path / "theirs.safetensors")
    with pytest.raises(KeyMapError, match="can't be cut along dim 0 into 2 parts"):
        load_weights(toys.make_toy(), tmp_path / "theirs.safetensors", key_map=key_map)


def test_runs_of_boxes() -> None:
    """The contiguous runs of a box, against plain indexing, for every small box of some shapes."""
    for shape in [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3)]:
        flat = torch.arange(max(1, torch.Size(shape).numel()))
        whole = flat.reshape(shape)
        boxes = [Box.full(shape)]
        for dim, size in enumerate(shape):
            boxes += [
                Box(tuple(o if d == dim else 0 for d in range(len(shape))),
                    tuple(size - o if d == dim else s for d, s in enumerate(shape)))
                for o in range(size)
            ]  # fmt: skip
        for box in boxes:
            found = torch.cat([flat[start : start + count] for start, count in runs(shape, box)])
            assert torch.equal(found, whole[box.slices].reshape(-1))
            pieces = [whole[piece.slices].reshape(-1) for piece in box.pieces(2)]
            assert torch.equal(torch.cat(pieces), found)
            assert all(len(piece) <= 2 for piece in pieces)


def test_a_key_maps_name_is_no_sign_of_a_prefix(tmp_path: Path) -> None:
    """Two readings without a prefix aren't two sub-models, whatever the map is called."""
    tensors = {name: tensor for name, tensor in toys.make_toy().state_dict().items() if name != "table"}
    save_file(tensors, tmp_path / "a.safetensors")
    same = KeyMap("ours under theirs", exact={name: name for name in tensors})
    report = load_weights(toys.make_toy(seed=3), tmp_path / "a.safetensors", key_map=same)
    assert report.naming == "names as they are"
