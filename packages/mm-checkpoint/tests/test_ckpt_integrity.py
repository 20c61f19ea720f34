"""Damage is found and named; nothing that is read may run code or leave its folder."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch

from mm_checkpoint import CheckpointManager, convert, export, load_weights, verify
from mm_checkpoint._formats.dcp_metadata import read_dcp_metadata
from mm_checkpoint.errors import BadInputError, CheckpointError, CorruptFileError, SourceError

SUB_MODELS = {"net": {"key_map": "ckpt_toy", "source_config": {"_class_name": "Toy"}, "export_folder": "transformer"}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    manager = CheckpointManager(tmp_path / "run")
    for step in (1, 2):
        manager.save(step, toys.state_of(toys.make_toy(), step=step), manifest={"sub_models": SUB_MODELS})
    return tmp_path / "run"


@pytest.fixture
def folders(run: Path, tmp_path: Path) -> dict[str, Path]:
    """Everything this package writes: a run, a converted DCP folder, sharded diffusers files, an export."""
    source = toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()))
    convert(source, tmp_path / "dcp", to="dcp", workers=2)
    convert(tmp_path / "dcp", tmp_path / "shards", to="diffusers", max_shard_size=500)
    export(run, tmp_path / "export", key_maps={"ckpt_toy": toys.KEY_MAP})
    names = {"dcp": "dcp", "shards": "shards", "export": "export/transformer"}
    return {"run": run, **{key: tmp_path / name for key, name in names.items()}}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_undamaged_folders_are_well(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        result = verify(folder)
        assert result.ok, result.problems
        assert result.notes == []


@pytest.mark.parametrize("kind", ["run", "dcp", "shards", "export"])
def test_every_flip_truncation_and_loss_is_named(folders: dict[str, Path], kind: str) -> None:
    """Each file of each folder: a flipped bit (several places), a cut end, an added byte, the file gone."""
    rng = random.Random(0)
    for file in files_of(folders[kind]):
        original = file.read_bytes()
        flips = []
        for _ in range(4):
            flipped = bytearray(original)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            flips.append(bytes(flipped))
        for damaged in (*flips, original[:-1], original[: len(original) // 2], original + b"\0", None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            if damaged is not None and file.suffix == ".txt" and damaged.strip() == original.strip():
                continue  # the tracker's white space says nothing
            blamed = file.parent if file.name == "manifest.json" and damaged is None else file
            if damaged is None and file.suffix == ".txt":  # a run without tracker is no damage
                assert any("no tracker" in note for note in verify(folders[kind]).notes)
            else:
                result = problems_of(folders[kind])
                assert any(str(blamed) in line for line in result), (file, damaged and len(damaged), result)
            file.write_bytes(original)


def problems_of(folder: Path) -> list[str]:
    try:
        result = verify(folder)
    except CheckpointError as error:
        return [str(error)]
    return result.problems + result.notes  # a folder without its manifest is a note


def test_foreign_folders_are_checked_for_structure(tmp_path: Path) -> None:
    """No manifest: a note says that there are no checksums; a broken structure is a problem all the same."""
    folder = toys.write_source(tmp_path / "src", toys.as_source(toys.make_toy()), shards=2)
    result = verify(folder)
    assert result.ok
    assert "no checksums are recorded" in result.notes[0]
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    assert any(shard.name in problem for problem in verify(folder).problems)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError):
        verify(tmp_path / "empty")


def test_verify_names_interrupted_saves(run: Path) -> None:
    (run / "iter_0000003").mkdir()
    assert any("iter_0000003" in problem for problem in verify(run).problems)


class Evil:
    """Would run a command if its pickle were loaded by an ordinary unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.marker}",))


def test_a_crafted_metadata_is_refused(run: Path, tmp_path: Path) -> None:
    """A .metadata that would run code is refused by everything that reads one, and nothing runs."""
    marker = tmp_path / "executed"
    iteration = run / "iter_0000002"
    original = pickle.loads((iteration / ".metadata").read_bytes())
    original.planner_data["x"] = (Evil(marker),)
    crafted = [pickle.dumps(Evil(marker)), pickle.dumps(original), b"cbuiltins\neval\n(S'1'\ntR.", b"\x80\x05."]
    model, manager = toys.make_toy(), CheckpointManager(run)
    for content in crafted:
        (iteration / ".metadata").write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"\.metadata: (it names .* refused|unreadable)"):
            read_dcp_metadata(iteration)
        attempts = [
            lambda: load_weights(model, iteration),
            lambda: manager.load(iteration, toys.state_of(model)),
            lambda: convert(iteration, tmp_path / "out", to="hf", prefix="model.net."),
        ]
        for attempt in attempts:
            with pytest.raises(BadInputError):
                attempt()
        assert verify(iteration).problems
    assert not marker.exists()
    pickle.loads(crafted[0])  # the ordinary unpickler would have run it
    assert marker.exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", ""])
def test_metadata_cannot_leave_its_folder(run: Path, name: str) -> None:
    path = run / "iter_0000002" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptFileError, match="leaves its folder"):
        read_dcp_metadata(run / "iter_0000002")


def test_metadata_that_does_not_add_up(run: Path) -> None:
    """Chunks outside of a tensor, missing chunks, offsets past a file's end."""
    path = run / "iter_0000002" / ".metadata"
    original = path.read_bytes()

    def change(edit: Any) -> None:
        metadata = pickle.loads(original)
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))

    entry = "model.net.head.weight"
    change(lambda m: m.state_dict_metadata[entry].chunks.clear())
    with pytest.raises(CorruptFileError, match=f"{entry}: the chunks hold 0 elements of 130"):
        load_weights(toys.make_toy(), run / "iter_0000002")
    change(lambda m: setattr(m.state_dict_metadata[entry], "size", torch.Size([3, 3])))
    with pytest.raises(CorruptFileError, match="is outside the shape"):
        load_weights(toys.make_toy(), run / "iter_0000002")
    change(lambda m: [setattr(info, "offset", info.offset + 10**9) for info in m.storage_data.values()])
    with pytest.raises(CorruptFileError, match="truncated"):
        load_weights(toys.make_toy(), run / "iter_0000002")
    change(lambda m: m.storage_data.clear())
    with pytest.raises(CorruptFileError):
        load_weights(toys.make_toy(), run / "iter_0000002")
    change(lambda m: [setattr(info, "offset", info.offset + 8) for info in m.storage_data.values()])
    with pytest.raises(CorruptFileError):
        load_weights(toys.make_toy(), run / "iter_0000002")


def test_what_an_export_leaves_can_be_verified(run: Path, tmp_path: Path) -> None:
    """Also without a pipeline around it: the models inside are checked."""
    export(run, tmp_path / "out", key_maps={"ckpt_toy": toys.KEY_MAP})
    result = verify(tmp_path / "out")
    assert result.ok
    assert result.checked
    shard = next((tmp_path / "out").rglob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert any(shard.name in problem for problem in verify(tmp_path / "out").problems)


def test_an_export_folder_cannot_leave_the_destination(run: Path, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "bad")
    for step, folder in enumerate(["../outside", "/abs", ".", "manifest.json"], 1):
        sub_models = {"net": {**SUB_MODELS["net"], "export_folder": folder}}
        path = manager.save(step, toys.state_of(toys.make_toy()), manifest={"sub_models": sub_models})
        with pytest.raises(CorruptFileError, match="leaves its folder|no export folder of its own"):
            export(path, tmp_path / "out", key_maps={"ckpt_toy": toys.KEY_MAP})
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "out").exists()
