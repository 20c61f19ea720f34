"""Conversion between all forms, the cache, and export."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from mm_checkpoint import (
    CheckpointManager,
    WeightSourceConfig,
    convert,
    export,
    load_weights,
    read_manifest,
    resolve_source,
    verify,
)
from mm_checkpoint._disk.manifest import write_manifest
from mm_checkpoint._weights import conversion_cache as cache_module
from mm_checkpoint._weights import convert as convert_module
from mm_checkpoint.errors import BadInputError, DestinationError, SourceError

STEM = "diffusion_pytorch_model"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()), shards=3)


@pytest.mark.parametrize("workers", [1, 3])
def test_through_every_form(tmp_path: Path, source: Path, workers: int) -> None:
    """diffusers -> DCP -> hf -> one file -> DCP -> diffusers: names, types and bits as they were; config.json too."""
    steps = [("dcp", "a"), ("hf", "b"), ("safetensors", "c.safetensors"), ("dcp", "d"), ("diffusers", "e")]
    at: Path = source
    for to, name in steps:
        done = convert(at, tmp_path / name, to=to, workers=workers, max_shard_size=800)
        assert done.tensors == 10
        at = tmp_path / name
        assert verify(at).ok
    toys.assert_same(toys.read_all(tmp_path / "e"), toys.as_source(toys.make_toy()))
    assert (tmp_path / "b" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_equal_files(tmp_path: Path) -> None:
    """A file that comes back is the same file, header and free metadata included."""
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(7).bfloat16(), "d": torch.tensor(True)}
    save_file(tensors, tmp_path / "in.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "in.safetensors", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "out.safetensors", to="safetensors")
    assert (tmp_path / "in.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()
    save_file(tensors, tmp_path / "meta.safetensors", metadata={"license": "none"})
    convert(tmp_path / "meta.safetensors", tmp_path / "dcp2", to="dcp")
    convert(tmp_path / "dcp2", tmp_path / "out", to="hf")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"license": "none"}


def test_chunks_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a piece: several chunks in DCP, which torch's own reader puts together too."""
    import torch.distributed.checkpoint as dcp

    from mm_checkpoint._formats import safetensors

    monkeypatch.setattr(safetensors, "PIECE_BYTES", 64)
    tensors = {"a": torch.randn(10, 7), "b": torch.randn(3, 40), "c": torch.randn(())}
    save_file(tensors, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "dcp", to="dcp")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    toys.assert_same(loaded, tensors)
    convert(tmp_path / "dcp", tmp_path / "out.safetensors", to="safetensors", dtype="fp64")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        toys.assert_same({n: file.get_tensor(n) for n in tensors}, {n: t.double() for n, t in tensors.items()})


def test_folders_that_torch_wrote(tmp_path: Path) -> None:
    """DCP from torch alone: nested state, transposed and sliced tensors (it stores their strides)."""
    import torch.distributed.checkpoint as dcp

    base = torch.randn(6, 8)
    state = {"model": {"t": base.t(), "s": base[1:3, 2:5], "e": base[:, :0], "x": base[0, 0]}, "step": 3}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "out.safetensors", to="safetensors", prefix="model.")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        toys.assert_same({n: file.get_tensor(n) for n in file.keys()}, state["model"])  # noqa: SIM118
    assert "no checksums" in verify(tmp_path / "dcp").notes[0]


def test_dtype_on_request(tmp_path: Path, source: Path) -> None:
    """Floating tensors only; an unknown type is refused with the nearest."""
    save_file({"f": torch.randn(4), "i": torch.arange(3)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "out", to="hf", dtype="bf16")
    found = toys.read_all(tmp_path / "out")
    assert (found["f"].dtype, found["i"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(BadInputError, match="'bfloat15' is no floating type; did you mean bfloat16"):
        convert(source, tmp_path / "x", to="hf", dtype="bfloat15")
    with pytest.raises(BadInputError, match="'int32' is no floating type"):
        convert(source, tmp_path / "x", to="hf", dtype="int32")


def test_shard_sizes(tmp_path: Path, source: Path) -> None:
    """B106 (sizes). No file over the limit unless one tensor is; the index covers all, and its total is the sum."""
    convert(source, tmp_path / "out", to="diffusers", max_shard_size="1KB")
    index = json.loads((tmp_path / "out" / f"{STEM}.safetensors.index.json").read_text())
    expected = toys.as_source(toys.make_toy())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"{STEM}-00001-of-{len(files):05d}.safetensors"
    for file in files:
        names = [name for name, where in index["weight_map"].items() if where == file]
        assert len(names) == 1 or sum(expected[name].nbytes for name in names) <= 1000
    for size in ("0", "five", "-1GB", "3XB", ""):
        with pytest.raises(BadInputError, match="is not a number of bytes"):
            convert(source, tmp_path / "x", to="hf", max_shard_size=size)


def test_destinations_are_never_overwritten(tmp_path: Path, source: Path) -> None:
    for name, to in [("full", "hf"), ("file.safetensors", "safetensors"), ("file.safetensors", "dcp")]:
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "x").touch()
        (tmp_path / "file.safetensors").touch()
        with pytest.raises(DestinationError, match="already exists"):
            convert(source, tmp_path / name, to=to)
    with pytest.raises(BadInputError, match="is a file named"):
        convert(source, tmp_path / "folder", to="safetensors")
    with pytest.raises(BadInputError, match="to: 'onnx' is not one of hf"):
        convert(source, tmp_path / "x", to="onnx")
    with pytest.raises(DestinationError, match="can't be made"):
        convert(source, tmp_path / "file.safetensors" / "x", to="hf")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", to="hf")


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "write_metadata", broken)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", to="dcp")
    assert sorted(tmp_path.iterdir()) == before


# --- the cache ----------------------------------------------------------------------------------------------------


def load_through_cache(source: Path, cache: Path) -> dict[str, torch.Tensor]:
    config = WeightSourceConfig(from_pretrained=str(source), load_format="dcp", checkpoint_conversion_dir=str(cache))
    model = toys.make_toy(seed=8)
    report = load_weights(model, resolve_source(config), key_map=toys.KEY_MAP)
    assert "converted once into" in report.source
    return dict(model.state_dict())


def test_cache_is_made_once_and_used_again(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    toys.assert_same(load_through_cache(source, cache), dict(toys.make_toy().state_dict()))
    iteration = cache / "iter_0000000"
    assert (cache / "latest_checkpointed_iteration.txt").read_text() == "0\n"
    made = iteration.stat().st_ino
    for file in source.iterdir():
        os.utime(file, (1, 1))  # times say nothing
    load_through_cache(source, cache)
    assert iteration.stat().st_ino == made


def test_cache_follows_its_source(tmp_path: Path, source: Path) -> None:
    """Changed weights (same sizes) make a new cache, and so does a half-written or damaged one."""
    cache = tmp_path / "cache"
    load_through_cache(source, cache)
    other = toys.make_toy(seed=1)
    toys.write_source(source, toys.as_source(other), shards=3)
    toys.assert_same(load_through_cache(source, cache), dict(other.state_dict()))
    chunk = cache / "iter_0000000" / "__0_0.distcp"
    metadata = chunk.parent / ".metadata"
    for damage in (lambda: chunk.write_bytes(b""), metadata.unlink, chunk.unlink, lambda: shutil.rmtree(chunk.parent)):
        damage()
        toys.assert_same(load_through_cache(source, cache), dict(other.state_dict()))
    assert sorted(path.name for path in cache.iterdir() if path.name != ".digests.json") == [
        ".digests.lock",
        ".lock",
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]


def test_weights_that_change_in_the_middle_are_converted_again(tmp_path: Path) -> None:
    """What a merge into some layers looks like: size, time, header, head and tail stay, also through ``cp -p``."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1 << 20))
    tensors = {"weight": torch.arange(1 << 20, dtype=torch.float32)}
    save_file(tensors, source / f"{STEM}.safetensors")
    file = source / f"{STEM}.safetensors"
    os.utime(file, ns=(10**18, 10**18))
    config = WeightSourceConfig(from_pretrained=str(source), load_format="dcp", checkpoint_conversion_dir=str(cache))
    load_weights(model, resolve_source(config))
    tensors["weight"][1 << 19] = -1.0
    save_file(tensors, file)
    os.utime(file, ns=(10**18, 10**18))
    load_weights(model, resolve_source(config))
    assert torch.equal(model.weight, tensors["weight"])


def test_a_source_that_changes_while_it_is_converted_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cache_module.write_dcp_folder

    def change_then_write(*args: Any, **options: Any) -> None:
        toys.write_source(source, toys.as_source(toys.make_toy(seed=1)), shards=3)
        write(*args, **options)

    monkeypatch.setattr(cache_module, "write_dcp_folder", change_then_write)
    with pytest.raises(SourceError, match="changed while it was converted"):
        load_through_cache(source, tmp_path / "cache")
    assert not (tmp_path / "cache" / "iter_0000000").exists()
    monkeypatch.undo()
    toys.assert_same(load_through_cache(source, tmp_path / "cache"), dict(toys.make_toy(seed=1).state_dict()))


def test_a_conversion_by_version_0_1_is_made_again(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its fingerprint was of samples of the source, so it doesn't prove that the source is the same."""
    load_through_cache(source, tmp_path / "cache")
    iteration = tmp_path / "cache" / "iter_0000000"
    manifest = read_manifest(iteration)
    (iteration / "manifest.json").unlink()
    write_manifest(iteration, manifest | {"source_fingerprint": "0" * 64})
    with caplog.at_level("INFO"):
        toys.assert_same(load_through_cache(source, tmp_path / "cache"), dict(toys.make_toy().state_dict()))
    assert "again: version 0.1, which made the conversion there, compared only parts of the source" in caplog.text
    assert read_manifest(iteration)["source_fingerprint"].startswith("xxh3_128_")


def test_checkpoint_path_as_the_cache(tmp_path: Path, source: Path) -> None:
    """With no conversion folder named, checkpoint_path is the cache, checked against from_pretrained each time."""
    config = WeightSourceConfig(from_pretrained=str(source), checkpoint_path=str(tmp_path / "cache"), load_format="dcp")
    for seed in (0, 1):
        toys.write_source(source, toys.as_source(toys.make_toy(seed=seed)), shards=3)
        model = toys.make_toy(seed=8)
        load_weights(model, resolve_source(config), key_map=toys.KEY_MAP)
        toys.assert_same(dict(model.state_dict()), dict(toys.make_toy(seed=seed).state_dict()))
    alone = WeightSourceConfig(checkpoint_path=str(tmp_path / "cache"), load_format="dcp")
    load_weights(toys.make_toy(), resolve_source(alone), key_map=toys.KEY_MAP)


def test_a_runs_folder_is_no_cache(tmp_path: Path, source: Path) -> None:
    """Only what this package converted is ever replaced: not a run's iteration 0, nor one that torch alone wrote."""
    for step in (0, 5):
        CheckpointManager(tmp_path / f"run{step}").save(step, {"model": {"w": torch.ones(2)}})
    shutil.copytree(tmp_path / "run0", tmp_path / "foreign")
    (tmp_path / "foreign" / "iter_0000000" / "manifest.json").unlink()
    for name in ("run0", "run5", "foreign"):
        with pytest.raises(DestinationError, match="are no conversion of ours; name another cache"):
            load_through_cache(source, tmp_path / name)
    assert verify(tmp_path / "run0").ok


def test_two_jobs_into_one_cache(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads that start at once (each opens the lock itself, as processes do): one conversion, no damage."""
    count = 0
    original = cache_module._convert_into

    def counting(*args: Any) -> None:
        nonlocal count
        count += 1
        original(*args)

    monkeypatch.setattr(cache_module, "_convert_into", counting)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(load_through_cache(source, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 1
    assert len(results) == 4
    for result in results:
        toys.assert_same(result, dict(toys.make_toy().state_dict()))


# --- export -------------------------------------------------------------------------------------------------------


def save_run(folder: Path, model: torch.nn.Module, name: str = "net", **fields: Any) -> Path:
    entry = {"key_map": "ckpt_toy", "source_config": {"_class_name": "Toy"}, "export_folder": "transformer", **fields}
    state = {"model": {f"{name}.{key}": tensor for key, tensor in model.state_dict().items()}}
    with CheckpointManager(folder) as manager:
        return manager.save(1, state, manifest={"sub_models": {name: entry}})


def test_export_gives_back_the_source(tmp_path: Path) -> None:
    """bf16 source with one fp32 tensor, trained in fp32, exported untouched: names, types and bits of the source."""
    tensors = {n: t if "norm" in n else t.bfloat16() for n, t in toys.as_source(toys.make_toy(tied=True)).items()}
    del tensors["out.weight"]
    source = toys.write_source(tmp_path / "src", tensors)
    model = toys.make_toy(seed=1, tied=True)
    report = load_weights(model, source, key_map=toys.KEY_MAP)
    run = tmp_path / "run"
    save_run(run, model, source_dtypes=report.source_dtypes, ties=report.ties)
    assert export(run, tmp_path / "out", key_maps={"ckpt_toy": toys.KEY_MAP}) == [tmp_path / "out" / "transformer"]
    out = tmp_path / "out" / "transformer"
    toys.assert_same(toys.read_all(out), tensors)
    assert (out / f"{STEM}.safetensors").read_bytes() == (source / f"{STEM}.safetensors").read_bytes()
    assert json.loads((out / "config.json").read_text()) == {"_class_name": "Toy"}


def test_export_with_another_type_and_prefix(tmp_path: Path) -> None:
    """B026. A bf16 export: header types, half the bytes. A pack's prefix in front of every name if the run says so."""
    save_run(tmp_path / "run", toys.make_toy(), export_prefix="model.diffusion_model.", key_map=None)
    export(tmp_path / "run", tmp_path / "out", to="safetensors", dtype="bf16")
    with safe_open(tmp_path / "out" / "net.safetensors", "pt") as file:
        names = list(file.keys())
        assert all(name.startswith("model.diffusion_model.") for name in names)
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    full = sum(tensor.nbytes for tensor in toys.make_toy().state_dict().values())
    raw = (tmp_path / "out" / "net.safetensors").read_bytes()
    assert len(raw) - 8 - int.from_bytes(raw[:8], "little") == full // 2


def test_export_of_tied_tensors(tmp_path: Path) -> None:
    """B006. Two names for one tensor: one copy in the file, under the shorter name; loading ties again."""
    model = toys.make_toy(tied=True)
    save_run(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", key_maps={"ckpt_toy": toys.KEY_MAP})
    names = toys.read_all(tmp_path / "out" / "transformer")
    assert ("out.weight" in names) != ("embed.weight" in names)
    loaded = toys.make_toy(seed=3, tied=True)
    load_weights(loaded, tmp_path / "out" / "transformer", key_map=toys.KEY_MAP)
    toys.assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("link", [False, True])
def test_export_into_a_pipeline(tmp_path: Path, link: bool) -> None:
    """With a base, everything but the exported folder comes from there."""
    base = tmp_path / "base"
    for name in ("transformer", "vae", "scheduler"):
        (base / name).mkdir(parents=True)
        (base / name / "config.json").write_text(json.dumps({"name": name}))
    index = {"_class_name": "P", "transformer": ["d", "T"], "vae": ["d", "V"], "scheduler": ["d", "S"]}
    (base / "model_index.json").write_text(json.dumps(index))
    save_run(tmp_path / "run", toys.make_toy())
    export(tmp_path / "run", tmp_path / "out", base=base, link=link, key_maps={"ckpt_toy": toys.KEY_MAP})
    assert json.loads((tmp_path / "out" / "model_index.json").read_text()) == index
    assert (tmp_path / "out" / "vae").is_symlink() == link
    assert json.loads((tmp_path / "out" / "vae" / "config.json").read_text()) == {"name": "vae"}
    assert json.loads((tmp_path / "out" / "transformer" / "config.json").read_text()) == {"_class_name": "Toy"}
    assert verify(tmp_path / "out").ok


def test_export_says_what_is_wrong(tmp_path: Path) -> None:
    model = toys.make_toy()
    maps = {"ckpt_toy": toys.KEY_MAP}
    with CheckpointManager(tmp_path / "bare") as manager:
        manager.save(1, toys.state_of(model))
    with pytest.raises(BadInputError, match="names no sub_models"):
        export(tmp_path / "bare", tmp_path / "out")
    save_run(tmp_path / "run", model)
    with pytest.raises(BadInputError, match="no key map 'ckpt_toy'"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "base").mkdir()
    with pytest.raises(SourceError, match=r"no model_index\.json"):
        export(tmp_path / "run", tmp_path / "out", base=tmp_path / "base", key_maps=maps)
    (tmp_path / "base" / "model_index.json").write_text('{"unet": ["d", "U"]}')
    with pytest.raises(SourceError, match=r"no component transformer \(it has unet\)"):
        export(tmp_path / "run", tmp_path / "out", base=tmp_path / "base", key_maps=maps)
    with pytest.raises(BadInputError, match="only goes with diffusers"):
        export(tmp_path / "run", tmp_path / "out", to="hf", base=tmp_path / "base")
    save_run(tmp_path / "moved", model, prefix="other.")
    with pytest.raises(SourceError, match=r"names net, but no tensor starts with model\.other\."):
        export(tmp_path / "moved", tmp_path / "out", key_maps=maps)
    with pytest.raises(SourceError, match="is a checkpoint of a training run"):
        convert(tmp_path / "run", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_a_single_model_run(tmp_path: Path) -> None:
    """A run of one model has no name in front: the manifest says so with an empty prefix."""
    model = toys.make_toy()
    entry = {"key_map": None, "prefix": ""}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": model.state_dict()}, manifest={"sub_models": {"model": entry}})
    export(tmp_path / "run", tmp_path / "out", to="hf")
    toys.assert_same(toys.read_all(tmp_path / "out" / "model"), dict(model.state_dict()))


def save_on_ranks(rank: int, world_size: int, folder: str) -> None:
    model = toys.shard(toys.make_toy(), toys.make_mesh(world_size))
    save_run(Path(folder), model)


def test_export_of_a_sharded_run(run_ranks: Any, tmp_path: Path) -> None:
    """B106. From 4 ranks to sharded diffusers files in one command on one process."""
    run_ranks(save_on_ranks, 4, str(tmp_path / "run"))
    export(tmp_path / "run", tmp_path / "out", max_shard_size="1KB", workers=2, key_maps={"ckpt_toy": toys.KEY_MAP})
    toys.assert_same(toys.read_all(tmp_path / "out" / "transformer"), toys.as_source(toys.make_toy()))
