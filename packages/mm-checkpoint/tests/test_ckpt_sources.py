"""Finding and opening weight sources."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_checkpoint import WeightSourceConfig, convert, find_source, load_weights, resolve_source, sniff_format
from mm_checkpoint.errors import CheckpointError, CorruptFileError, SourceError, WeightMismatchError

STEM = "diffusion_pytorch_model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A toy in three diffusers shards with an index."""
    return toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()), shards=3)


def edit_index(folder: Path, change: Any) -> None:
    path = folder / f"{STEM}.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def start(folder: Path, **options: Any) -> Any:
    """What a trainer does with a source: resolve, then load."""
    source = resolve_source(WeightSourceConfig(from_pretrained=str(folder), **options))
    model = toys.make_toy(seed=9)
    load_weights(model, source, key_map=toys.KEY_MAP)
    return dict(model.state_dict())


@pytest.mark.parametrize("load_format", ["diffusers", "dcp"])
def test_a_missing_shard_stops_the_start(sharded: Path, tmp_path: Path, load_format: str) -> None:
    """B001. The index names a shard that is not there: an error that names it, and no reusable cache."""
    (sharded / f"{STEM}-00002-of-00003.safetensors").unlink()
    cache = tmp_path / "cache"
    with pytest.raises(SourceError, match=rf"not there: {STEM}-00002-of-00003\.safetensors"):
        start(sharded, load_format=load_format, checkpoint_conversion_dir=str(cache))
    assert not list(cache.glob("iter_*"))


def test_a_stale_index_is_an_error(sharded: Path) -> None:
    """B002. A tensor that the index places in another existing file."""
    name = "layers.1.proj_up.weight"
    edit_index(sharded, lambda weight_map: weight_map.update({name: f"{STEM}-00001-of-00003.safetensors"}))
    with pytest.raises(SourceError, match=rf"{name} should be in {STEM}-00001.* it is in {STEM}-0000[23]"):
        start(sharded)


def test_an_index_must_list_every_tensor(sharded: Path) -> None:
    """B002, the other way round: a tensor in a shard that the index doesn't know."""
    edit_index(sharded, lambda weight_map: weight_map.pop("out.weight"))
    with pytest.raises(SourceError, match="doesn't list: out.weight"):
        start(sharded)


def test_stray_files_are_not_read(sharded: Path) -> None:
    """B003. The same names filled with zeros in a neighbour file: only what the index lists is read."""
    expected = toys.as_source(toys.make_toy())
    save_file({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, sharded / "old.safetensors")
    toys.assert_same(start(sharded), dict(toys.make_toy().state_dict()))


def test_stray_file_beside_a_single_file(tmp_path: Path) -> None:
    """B003 without an index: the file with the layout's own name is the one."""
    tensors = toys.as_source(toys.make_toy())
    folder = toys.write_source(tmp_path / "src", tensors)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "old.safetensors")
    toys.assert_same(start(folder), dict(toys.make_toy().state_dict()))


def test_two_files_without_a_usual_name_are_ambiguous(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(SourceError, match=r"several sets of weights: one.safetensors, two.safetensors"):
        find_source(tmp_path)


def test_variants(tmp_path: Path) -> None:
    """Several sets of files side by side: the plain one unless another is asked for, or the only one."""
    save_file({"a": torch.zeros(2)}, tmp_path / f"{STEM}.safetensors")
    save_file({"a": torch.ones(2).half()}, tmp_path / f"{STEM}.fp16.safetensors")
    assert find_source(tmp_path).files[0].name == f"{STEM}.safetensors"
    assert find_source(tmp_path, variant="fp16").files[0].name == f"{STEM}.fp16.safetensors"
    with pytest.raises(SourceError, match="no weight files of variant 'bf16'"):
        find_source(tmp_path, variant="bf16")
    (tmp_path / f"{STEM}.safetensors").unlink()
    assert find_source(tmp_path).files[0].name == f"{STEM}.fp16.safetensors"


@pytest.mark.parametrize("index", [f"{STEM}.safetensors.index.fp16.json", f"{STEM}.fp16.safetensors.index.json"])
def test_sharded_variants(sharded: Path, index: str) -> None:
    """fp16 shards beside the plain ones: each set by its own index, whichever way that is named."""
    for path in sorted(sharded.glob("*.safetensors")):
        halves = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(halves, path.with_name(path.name.replace(STEM, f"{STEM}.fp16")))
    plain = sharded / f"{STEM}.safetensors.index.json"
    (sharded / index).write_text(plain.read_text().replace(STEM, f"{STEM}.fp16"))
    assert {info.dtype for info in find_source(sharded).open().tensors.values()} == {"float32"}
    for found in (find_source(sharded, variant="fp16"), find_source(sharded / index)):
        assert {info.dtype for info in found.open().tensors.values()} == {"float16"}
    plain.unlink()
    for path in sharded.glob(f"{STEM}-*.safetensors"):
        path.unlink()
    assert {info.dtype for info in find_source(sharded).open().tensors.values()} == {"float16"}


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../x.safetensors", "a\\b", ""])
def test_an_index_cannot_leave_its_folder(sharded: Path, name: str) -> None:
    (sharded.parent / "secret.safetensors").write_bytes(b"x")
    edit_index(sharded, lambda weight_map: weight_map.update({"out.weight": name}))
    with pytest.raises(CorruptFileError, match="leaves its folder"):
        start(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / f"{STEM}.safetensors.index.json").unlink()
    with pytest.raises(SourceError, match="no index json"):
        find_source(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', ""])
def test_unreadable_index(sharded: Path, text: str) -> None:
    (sharded / f"{STEM}.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"index\.json"):
        find_source(sharded)


def test_sniffing(tmp_path: Path, sharded: Path) -> None:
    """DCP before diffusers before hf; a folder of none of them, a pipeline and a missing path say what they are."""
    assert sniff_format(sharded) == "diffusers"
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file({"a": torch.zeros(1)}, hf / "model.safetensors")
    assert sniff_format(hf) == "hf"
    convert(hf, tmp_path / "dcp", to="dcp")
    assert sniff_format(tmp_path / "dcp") == "dcp"
    save_file({"a": torch.zeros(1)}, tmp_path / "dcp" / "model.safetensors")
    assert sniff_format(tmp_path / "dcp") == "dcp"
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no weights in DCP, diffusers or hf form"):
        sniff_format(tmp_path / "empty")
    with pytest.raises(SourceError, match=r"no such file or folder \(.*exists\)"):
        sniff_format(tmp_path / "not" / "there")
    pipeline = tmp_path / "pipeline"
    (pipeline / "transformer").mkdir(parents=True)
    (pipeline / "model_index.json").write_text("{}")
    (pipeline / "transformer" / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="whole pipeline; name one of its folders: transformer"):
        sniff_format(pipeline)


def test_declared_format_must_be_true(tmp_path: Path, sharded: Path) -> None:
    convert(sharded, tmp_path / "dcp", to="dcp")
    with pytest.raises(SourceError, match="is in dcp form, not in the declared diffusers"):
        resolve_source(WeightSourceConfig(from_pretrained=str(tmp_path / "dcp"), load_format="diffusers"))


def test_precedence_and_aliases(tmp_path: Path, sharded: Path) -> None:
    """checkpoint_path comes first; nothing named is no source; aliases; an unknown format names the allowed ones."""
    assert resolve_source(WeightSourceConfig()) is None
    found = resolve_source(WeightSourceConfig(checkpoint_path=str(sharded), from_pretrained=str(tmp_path / "none")))
    assert found is not None
    assert found.path == sharded
    assert found.config == {"_class_name": "Toy"}
    assert WeightSourceConfig(load_format="HuggingFace").format == "hf"
    with pytest.raises(ValueError, match="'onnx' is not one of auto, hf, diffusers, dcp"):
        WeightSourceConfig(load_format="onnx")


def test_cache_order(tmp_path: Path, sharded: Path) -> None:
    """checkpoint_conversion_dir, dcp_cache_dir, dcp_conversion_dir, checkpoint_path; none of the four is an error."""

    def cache(**options: Any) -> str | None:
        source = resolve_source(WeightSourceConfig(from_pretrained=str(sharded), load_format="dcp", **options))
        assert source is not None
        assert source.path == sharded
        return source.cache.name if source.cache else None

    folders = {key: str(tmp_path / key) for key in ("checkpoint_conversion_dir", "dcp_cache_dir", "dcp_conversion_dir")}
    assert cache(**folders) == "checkpoint_conversion_dir"
    assert cache(**{k: folders[k] for k in ("dcp_cache_dir", "dcp_conversion_dir")}) == "dcp_cache_dir"
    assert cache(dcp_conversion_dir=folders["dcp_conversion_dir"]) == "dcp_conversion_dir"
    assert cache(checkpoint_path=str(tmp_path / "checkpoint_path")) == "checkpoint_path"
    with pytest.raises(SourceError, match="set checkpoint_conversion_dir, dcp_cache_dir, dcp_conversion_dir or"):
        cache()
    with pytest.raises(SourceError, match="no from_pretrained to fill it"):
        resolve_source(WeightSourceConfig(checkpoint_path=str(tmp_path / "new"), load_format="dcp"))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("native", [True, False])
def test_single_file_packs(tmp_path: Path, prefix: str, native: bool) -> None:
    """One file, with native or diffusers names, with or without a pack's prefix, with another model beside it."""
    model = toys.make_toy()
    tensors = dict(model.state_dict()) if native else toys.as_source(model)
    pack = {prefix + name: tensor.clone() for name, tensor in tensors.items()}
    if prefix:
        pack["first_stage_model.decoder.weight"] = torch.zeros(3)
    save_file(pack, tmp_path / "pack.safetensors")
    loaded = toys.make_toy(seed=5)
    report = load_weights(loaded, tmp_path / "pack.safetensors", key_map=toys.KEY_MAP)
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert ("as they are" in report.naming) == native
    assert (repr(prefix) in report.naming) == bool(prefix)


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_original_release_as_pickle(tmp_path: Path, wrapper: str | None) -> None:
    """.pth with native names, flat or under a usual key, through weights_only."""
    model = toys.make_toy()
    content: Any = dict(model.state_dict())
    torch.save({wrapper: content, "step": 3} if wrapper else content, tmp_path / "release.pth")
    loaded = toys.make_toy(seed=5)
    load_weights(loaded, tmp_path / "release.pth", key_map=toys.KEY_MAP)
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    old = tmp_path / "old.bin"
    torch.save(content, old, _use_new_zipfile_serialization=False)
    load_weights(toys.make_toy(), old)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_pickles_never_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.bin").write_bytes(pickle.dumps({"a": Evil()}))
    torch.save({"a": torch.zeros(1), "b": Evil()}, tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, match in [("evil.bin", "weights_only"), ("evil.pth", "weights_only"), ("list.pt", "no flat table")]:
        with pytest.raises(CheckpointError, match=match):
            find_source(tmp_path / name).open()
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda raw: raw[:-1], "its header describes"),
        (lambda raw: raw + b"x", "its header describes"),
        (lambda raw: raw[:5], "not a safetensors file, or truncated"),
        (lambda raw: b"", "not a safetensors file, or truncated"),
        (lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:], "not a safetensors file"),
        (lambda raw: raw.replace(b'"F32"', b'"F99"', 1), "unknown element type 'F99'"),
        (lambda raw: raw.replace(b"[13,10]", b"[14,10]", 1), "takes 520 bytes"),
        (lambda raw: raw.replace(b'"shape":[13,10]', b'"shape":[-1,10]', 1), "header"),
        (lambda raw: raw.replace(b'"embed.weight"', b'"out.weight"  ', 1), "a name occurs twice"),
        (lambda raw: raw.replace(b'{"dtype"', b'["dtype"', 1), "unreadable safetensors header"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage: Any, match: str) -> None:
    folder = toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()))
    path = folder / f"{STEM}.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptFileError, match=match):
        start(folder)


def test_an_undeclared_prefix_is_an_error(tmp_path: Path) -> None:
    """B004. A prefix nobody declared: counts, names and the nearest ones, never a silently random model."""
    tensors = {f"model.{name}": tensor for name, tensor in toys.as_source(toys.make_toy()).items()}
    folder = toys.write_source(tmp_path / "src", tensors)
    with pytest.raises(WeightMismatchError, match=r"0 name\(s\) matched, 10 missing, 10 unexpected") as caught:
        start(folder)
    assert str(folder) in str(caught.value)
    assert "missing: blocks.0.down.weight" in str(caught.value)
    assert "unexpected: model.embed.weight" in str(caught.value)


def test_one_missing_and_one_unexpected_name(tmp_path: Path) -> None:
    """B004. One of each is as much an error as all of them; the nearest name in the file is shown."""
    tensors = toys.as_source(toys.make_toy())
    tensors["layers.1.proj_upp.weight"] = tensors.pop("layers.1.proj_up.weight")
    folder = toys.write_source(tmp_path / "src", tensors)
    with pytest.raises(WeightMismatchError, match="9 name.* 1 missing, 1 unexpected") as caught:
        start(folder)
    assert "nearest to blocks.1.up.weight in the file: blocks.1.upp.weight" in str(caught.value)
    del tensors["layers.1.proj_upp.weight"]
    with pytest.raises(WeightMismatchError, match="9 name.* 1 missing, 0 unexpected"):
        start(toys.write_source(tmp_path / "missing", tensors))
    surplus = {**toys.as_source(toys.make_toy()), "lora.weight": torch.zeros(1)}
    with pytest.raises(WeightMismatchError, match=r"10 name.* 0 missing, 1 unexpected[\s\S]*lora.weight"):
        start(toys.write_source(tmp_path / "surplus", surplus))
