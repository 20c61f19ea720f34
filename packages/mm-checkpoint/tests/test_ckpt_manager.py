"""Saving, finding and resuming on one process: order, retention, damage, disks that fill."""

from __future__ import annotations

import errno
import json
import logging
import threading
from pathlib import Path
from typing import Any

import ckpt_helpers as toys
import pytest
import torch
import xxhash

from mm_checkpoint import CheckpointManager, read_manifest
from mm_checkpoint._disk import build_folder, durable
from mm_checkpoint.errors import (
    BadInputError,
    CorruptFileError,
    DestinationError,
    IncompleteCheckpointError,
    SaveError,
    WeightMismatchError,
)

TRACKER = "latest_checkpointed_iteration.txt"


def state(value: float = 1.0, **values: Any) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 5), value)}, "train": {"step": 0, **values}}


def value_of(manager: CheckpointManager, path: Path | None = None) -> float:
    target = state(0.0)
    found = path or manager.latest()
    assert found is not None
    manager.load(found, target)
    return target["model"]["w"][0, 0].item()


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def shell(root: Path, name: str) -> None:
    """An iteration as it is on disk, under any name."""
    manager = CheckpointManager(root / "tmp")
    manager.save(1, state())
    (root / "tmp" / "iter_0000001").rename(root / name)
    (root / "tmp" / TRACKER).unlink()
    (root / "tmp").rmdir()


def test_what_lies_on_the_disk(tmp_path: Path) -> None:
    """Design §7: the layout, and a manifest with sizes, checksums and the caller's fields."""
    sub_models = {"net": {"key_map": None, "source_config": {"a": 1}, "export_folder": "transformer"}}
    manager = CheckpointManager(tmp_path)
    path = manager.save(120, state(step=120), manifest={"samples_seen": 960, "sub_models": sub_models})
    assert path == tmp_path / "iter_0000120"
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert (tmp_path / TRACKER).read_text() == "120\n"
    manifest = read_manifest(path)
    assert (manifest["format_version"], manifest["step"], manifest["samples_seen"]) == (1, 120, 960)
    assert manifest["sub_models"] == sub_models
    for name, record in manifest["files"].items():
        assert record["size"] == (path / name).stat().st_size
        assert record["xxh3_64"] == xxhash.xxh3_64(Path(path / name).read_bytes()).hexdigest()


def test_plain_values_come_back(tmp_path: Path) -> None:
    """Nested values, empty mappings, other keys than strings, tensors: a section that is None comes back whole."""
    train = {"step": 7, "rng": torch.get_rng_state(), "data": {"epoch": 1, "seen": [1, 2], "none": {}, "ids": {3: "x"}}}
    manager = CheckpointManager(tmp_path)
    manager.save(7, {"model": {"w": torch.ones(2)}, "train": train})
    target = {"model": {"w": torch.zeros(2)}, "train": None}
    values = manager.load(tmp_path / "iter_0000007", target)
    assert torch.equal(target["model"]["w"], torch.ones(2))
    assert torch.equal(values["train"].pop("rng"), train.pop("rng"))
    assert values == {"train": train}


def test_torch_reads_it_too(tmp_path: Path) -> None:
    """The folder is DCP: torch's own load reads it."""
    import torch.distributed.checkpoint as dcp

    CheckpointManager(tmp_path).save(1, state(3.0, nested={"a": [1]}))
    target = state(0.0, nested={"a": [0]})
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    assert torch.equal(target["model"]["w"], torch.full((4, 5), 3.0))
    assert target["train"]["nested"] == {"a": [1]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda s: s["model"].update(extra=torch.zeros(1)),
            r"1 name\(s\) missing in the checkpoint[\s\S]*missing: model.extra",
        ),
        (lambda s: s["model"].update(ww=s["model"].pop("w")), r"nearest to model.ww: model.w[\s\S]*not in the state"),
        (lambda s: s["model"].update(w=torch.zeros(5, 4)), r"\[4, 5\] float32, wanted \[5, 4\] float32"),
        (lambda s: s["model"].update(w=torch.zeros(4, 5).half()), r"\[4, 5\] float32, wanted \[4, 5\] float16"),
        (lambda s: s["model"].update(w=3), "tensors on one side, plain values on the other: model.w"),
        (lambda s: s.update(ema=None), "no section 'ema'"),
        (lambda s: s["model"].update(w=torch.zeros(4, 5, device="meta")), "on meta: model.w"),
    ],
)
def test_names_are_compared_both_ways(tmp_path: Path, change: Any, match: str) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state())
    target = state(0.0)
    change(target)
    with pytest.raises((WeightMismatchError, Exception), match=match):
        manager.load(tmp_path / "iter_0000001", target)


def test_a_section_that_is_not_named_is_not_loaded(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(2.0) | {"optimizer": {"w.exp_avg": torch.ones(3)}})
    target = {"model": {"w": torch.zeros(4, 5)}}
    assert manager.load(tmp_path / "iter_0000001", target) == {}
    assert target["model"]["w"][0, 0] == 2.0


@pytest.mark.parametrize("value", [lambda: 0, torch.nn.Linear(1, 1), logging.getLogger("x")])
def test_values_that_would_not_load_are_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"can't be saved|pickle"):
        CheckpointManager(tmp_path).save(1, state(bad=value))
    assert folders(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*torch.sparse.*", "ignore:.*quantiz.*")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.eye(3).to_sparse(), "train.bad is of layout torch.sparse_coo"),
        (lambda: torch.ones(3, device="meta"), "train.bad is on meta"),
    ],
)
def test_tensors_that_cannot_be_stored(tmp_path: Path, make: Any, match: str) -> None:
    with pytest.raises(BadInputError, match=match):
        CheckpointManager(tmp_path).save(1, state(bad=make()))
    assert folders(tmp_path) == []


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    """Expanded, transposed, sliced, conjugated and negated views; and none is taken for its base's twin."""
    base = torch.tensor([[1 + 2j, 3 - 1j], [0 + 1j, 2 + 0j]])
    views = {
        "base": base,
        "t": base.t(),
        "conj": base.conj(),
        "neg": base.conj().imag,
        "row": base[1],
        "s": base[:, :1],
    }
    views["wide"] = torch.tensor([2.0]).expand(5)
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(1, {"model": views})
        found = {name: torch.zeros(view.shape, dtype=view.dtype) for name, view in views.items()}
        manager.load(path, {"model": found})
    toys.assert_same(found, {name: view.resolve_conj().resolve_neg() for name, view in views.items()})


@pytest.mark.parametrize("step", [-1, 1.5, "3"])
def test_steps_are_numbers(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of steps"):
        CheckpointManager(tmp_path).save(step, state())


def test_flat_names_may_not_collide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same flat name"):
        CheckpointManager(tmp_path).save(1, {"model": {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}})


def test_newest_is_by_number(tmp_path: Path) -> None:
    """B019. Names of any width are ordered as numbers; one number twice is an error."""
    for name in ("iter_9", "iter_10", "iter_0000008", "iter_10000000"):
        shell(tmp_path, name)
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == tmp_path / "iter_10000000"
    with pytest.raises(IncompleteCheckpointError, match="iter_0000008, iter_9, iter_10, iter_10000000; name one"):
        manager.resolve(tmp_path)
    shell(tmp_path, "iter_0000009")
    with pytest.raises(IncompleteCheckpointError, match="iter_0000009 and iter_9 are the same iteration"):
        manager.latest()


def test_retention(tmp_path: Path) -> None:
    """B019. keep_last and keep_every; -1 keeps all; 0 is refused."""
    with CheckpointManager(tmp_path / "two", keep_last=2, keep_every=4) as manager:
        for step in range(1, 8):
            manager.save(step, state())
    assert folders(tmp_path / "two") == ["iter_0000004", "iter_0000006", "iter_0000007"]
    with CheckpointManager(tmp_path / "all", keep_last=-1) as manager:
        for step in range(1, 6):
            manager.save(step, state())
    assert len(folders(tmp_path / "all")) == 5
    with CheckpointManager(tmp_path / "one", keep_last=1) as manager:
        for step in range(1, 4):
            manager.save(step, state())
    assert folders(tmp_path / "one") == ["iter_0000003"]
    for keep_last in (0, -2):
        with pytest.raises(ValueError, match=f"keep_last: {keep_last} would delete"):
            CheckpointManager(tmp_path, keep_last=keep_last)
    with pytest.raises(ValueError, match="keep_every: 0"):
        CheckpointManager(tmp_path, keep_every=0)


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    """B020. A fresh run in a folder that holds a later iteration: refused at the start and at the first save; nothing
    is deleted, neither theirs nor ours."""
    CheckpointManager(tmp_path).save(100, state(9.0))
    fresh = CheckpointManager(tmp_path, keep_last=1)
    with pytest.raises(DestinationError, match="holds iter_0000100, which this run did not write"):
        fresh.prepare(0)
    for step in (2, 100):
        with pytest.raises(DestinationError, match="save elsewhere, or resume from there"):
            fresh.save(step, state())
    assert folders(tmp_path) == ["iter_0000100"]
    elsewhere = CheckpointManager(tmp_path / "other")
    elsewhere.save(100, state())
    fresh.load(tmp_path / "other" / "iter_0000100", state())  # a warm start makes nothing in this folder ours
    with pytest.raises(DestinationError, match="this run did not write"):
        fresh.prepare(0)
    resumed = CheckpointManager(tmp_path, keep_last=1)
    resumed.load(tmp_path / "iter_0000100", state())
    resumed.prepare(100)
    resumed.save(102, state())
    assert folders(tmp_path) == ["iter_0000102", "other"]


def test_saving_one_step_twice(tmp_path: Path) -> None:
    """What this run wrote already is complete and is left alone; the second request is an error, not a silent skip."""
    manager = CheckpointManager(tmp_path)
    manager.save(2, state(1.0))
    with pytest.raises(DestinationError, match="iter_0000002: already saved"):
        manager.save(2, state(2.0))
    assert value_of(manager) == 1.0


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Every byte beyond ``limit`` meets a full disk, as a small tmpfs would do."""
    written = 0
    original = durable.DurableFile._put

    def put(self: Any, piece: memoryview) -> None:
        nonlocal written
        written += len(piece)
        if written > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, piece)

    monkeypatch.setattr(durable.DurableFile, "_put", put)


FILES_IN_ORDER = ("__0_0.distcp", ".metadata", "manifest.json")


@pytest.mark.parametrize("full_at", FILES_IN_ORDER)
def test_a_disk_that_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str) -> None:
    """B021. Full in the middle of each file: the earlier checkpoint loads, the tracker stays, nothing is left over."""
    manager = CheckpointManager(tmp_path)
    first = manager.save(1, state(1.0))
    before = FILES_IN_ORDER[: FILES_IN_ORDER.index(full_at)]
    limit = sum((first / name).stat().st_size for name in before) + 100
    with monkeypatch.context() as patch:
        fill_disk_after(patch, limit)
        with pytest.raises(SaveError, match=r"iter_0000002.*: No space left on device"):
            manager.save(2, state(2.0))
    assert [path.name for path in tmp_path.iterdir() if path.name != TRACKER] == ["iter_0000001"]
    assert (tmp_path / TRACKER).read_text() == "1\n"
    assert value_of(manager) == 1.0
    manager.save(3, state(3.0))
    assert value_of(manager) == 3.0


def test_a_disk_that_fills_at_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration is complete by then: it stays, the tracker lags, and ``auto`` finds it."""
    manager = CheckpointManager(tmp_path)
    first = manager.save(1, state(1.0))
    with monkeypatch.context() as patch:
        fill_disk_after(patch, sum(file.stat().st_size for file in first.iterdir()))
        with pytest.raises(SaveError, match="latest_checkpointed_iteration.*No space left"):
            manager.save(2, state(2.0))
    assert (tmp_path / TRACKER).read_text() == "1\n"
    assert value_of(manager) == 2.0


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B021. At the start and before each save, with path, free and needed bytes."""
    usage = type("usage", (), {"free": 3 << 20})
    monkeypatch.setattr(build_folder.shutil, "disk_usage", lambda path: usage)
    big = {"model": {"w": torch.zeros(1 << 20)}}
    manager = CheckpointManager(tmp_path)
    match = rf"{tmp_path}: 3,145,728 bytes are free, 5,284,823 are needed"
    with pytest.raises(SaveError, match=match):
        manager.prepare(0, big)
    with pytest.raises(SaveError, match=match):
        manager.save(1, big)
    assert folders(tmp_path) == []


def test_a_truncated_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B022. Half a chunk file: the error names it and the newest older complete one; ``auto`` goes back and warns."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state(float(step)))
    chunk = tmp_path / "iter_0000003" / "__0_0.distcp"
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    match = rf"iter_0000003 is not complete: {chunk}: [\d,]+ bytes, [\d,]+ were written; .*{tmp_path}/iter_0000002"
    for load in (tmp_path, tmp_path / "iter_0000003"):
        with pytest.raises(IncompleteCheckpointError, match=match):
            manager.resolve(load)
    with pytest.raises(IncompleteCheckpointError, match=match):
        manager.load(tmp_path / "iter_0000003", state())
    with caplog.at_level(logging.WARNING):
        assert manager.resolve("auto") == tmp_path / "iter_0000002"
    assert "iter_0000003 is not complete and is skipped" in caplog.text


def test_resolving(tmp_path: Path) -> None:
    """Design §7: the tracker's iteration, the only complete one, several, none; ``auto`` with and without any."""
    manager = CheckpointManager(tmp_path)
    assert manager.resolve("auto") is None
    with pytest.raises(IncompleteCheckpointError, match="no complete checkpoint in it"):
        manager.resolve(tmp_path)
    with pytest.raises(IncompleteCheckpointError, match="no such folder"):
        manager.resolve(tmp_path / "nowhere")
    manager.save(1, state())
    (tmp_path / TRACKER).unlink()
    assert manager.resolve(tmp_path) == tmp_path / "iter_0000001"
    manager.save(2, state())
    (tmp_path / TRACKER).write_text("1")  # a tracker may lag one save
    assert manager.resolve(str(tmp_path)) == tmp_path / "iter_0000001"
    assert manager.resolve("auto") == tmp_path / "iter_0000002"
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(IncompleteCheckpointError, match="iter_0000007 is not complete: .*no such folder"):
        manager.resolve(tmp_path)
    (tmp_path / TRACKER).write_text("seven")
    with pytest.raises(CorruptFileError, match="holds 'seven', expected an iteration number"):
        manager.resolve(tmp_path)
    for step in (1, 2):
        (tmp_path / f"iter_000000{step}" / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="none of its iterations"):
        manager.resolve("auto")


def test_leftovers_are_not_checkpoints(tmp_path: Path) -> None:
    """What a killed save leaves is neither found nor in the way, and goes at the next save."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, state())
    dead = tmp_path / f".iter_0000002{durable.PARTIAL_MARK}{durable.socket.gethostname()}-999999999-abc123"
    dead.mkdir()
    other_host = tmp_path / f".iter_0000002{durable.PARTIAL_MARK}elsewhere-1-abc123"
    other_host.mkdir()
    (tmp_path / "iter_0000002").mkdir()  # an empty shell, as other tools leave them
    assert manager.latest() == tmp_path / "iter_0000001"
    manager.save(2, state())
    assert manager.latest() == tmp_path / "iter_0000002"
    assert len(list(tmp_path.glob("iter_0000002.damaged-*"))) == 1
    assert not dead.exists()
    assert other_host.exists()


def test_async_save_is_the_state_at_the_call(tmp_path: Path) -> None:
    """B024. Load at once after an asynchronous save, with the weights changed in between: load waits, old values."""
    manager = CheckpointManager(tmp_path, async_save=True)
    live = state(1.0)
    for step in (1, 2):  # the second save uses the first one's buffers again
        live["model"]["w"].fill_(step)
        path = manager.save(step, live)
        live["model"]["w"].fill_(99.0)
        assert value_of(manager, path) == step
    manager.close()


def test_async_pointer_moves_after_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the bytes are being written, tracker and newest are those of the save before."""
    manager = CheckpointManager(tmp_path, async_save=True)
    manager.save(1, state(1.0))
    manager.wait()
    entered, go_on = threading.Event(), threading.Event()
    original = durable.DurableFile.finish

    def finish(self: Any) -> Any:
        entered.set()
        assert go_on.wait(30)
        return original(self)

    monkeypatch.setattr(durable.DurableFile, "finish", finish)
    manager.save(2, state(2.0))
    assert entered.wait(30)
    assert (tmp_path / TRACKER).read_text() == "1\n"
    assert folders(tmp_path)[-1] == "iter_0000001"
    go_on.set()
    manager.close()
    assert (tmp_path / TRACKER).read_text() == "2\n"


def test_async_errors_surface_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, async_save=True)
    with monkeypatch.context() as patch:
        fill_disk_after(patch, 0)
        manager.save(1, state())
        with pytest.raises(SaveError, match="No space left"):
            manager.wait()
        manager.save(2, state())
        with pytest.raises(SaveError, match="No space left"):
            manager.save(3, state())
    manager.save(4, state())
    manager.close()
    assert folders(tmp_path) == ["iter_0000004"]


def test_tied_tensors_are_copied_and_written_once(tmp_path: Path) -> None:
    model = toys.make_toy(tied=True)
    for name, asynchronous in [("sync", False), ("async", True)]:
        with CheckpointManager(tmp_path / name, async_save=asynchronous) as manager:
            path = manager.save(1, toys.state_of(model))
        untied = toys.make_toy(seed=1, tied=True)
        target = toys.state_of(untied)
        CheckpointManager(tmp_path / name).load(path, target)
        toys.assert_same(dict(untied.state_dict()), dict(model.state_dict()))
    size = (path / "__0_0.distcp").stat().st_size
    with CheckpointManager(tmp_path / "untied") as manager:
        path = manager.save(1, toys.state_of(toys.make_toy()))
    assert (path / "__0_0.distcp").stat().st_size > size


def test_manifest_fields_are_protected(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="manifest: files can't be given"):
        manager.save(1, state(), manifest={"files": {}})
    with pytest.raises(ValueError, match="manifest: step 3 given while saving step 1"):
        manager.save(1, state(), manifest={"step": 3})
    with pytest.raises(TypeError, match="manifest: Object of type PosixPath is not JSON"):
        manager.save(1, state(), manifest={"where": tmp_path})
    path = manager.save(1, state())
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"step": 2}, indent=2) + "\n")
    with pytest.raises(CorruptFileError, match="has changed since it was written"):
        read_manifest(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    from mm_checkpoint._disk import manifest

    manifest.write_manifest(tmp_path, {**manifest.make_manifest({}, {}), "format_version": 99})
    with pytest.raises(CorruptFileError, match="format version 99, this release reads up to 1"):
        read_manifest(tmp_path)
