"""The conditions cache: written on any number of ranks, resumable, never stale."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data_clips import WordTokenizer, context, write_clip
from data_fakes import NumberDataset
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from mm_trainer.contracts.dataset import MapDataset
from mm_trainer.data.bad_samples import Loaded
from mm_trainer.data.batch import to_pixels
from mm_trainer.data.cache.dataset import UNKNOWN, CachedDataset
from mm_trainer.data.cache.shards import ShardWriter
from mm_trainer.data.cache.writer import CacheOptions, CacheReport, write_cache
from mm_trainer.data.loader import BatchLoader, WorkerOptions
from mm_trainer.data.video.dataset import VideoDataset
from mm_trainer.errors import DataError

SETTINGS = {"data": {"fps": 16}, "encoders": {"ae": "abc"}}


def encode(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Small stand-ins for a VAE and a text encoder: pooled pixels, and embedded words with zeros past the prompt."""
    latents = F.avg_pool3d(to_pixels(batch["video"]), (1, 16, 16))
    context = F.one_hot(batch["prompt_ids"] % 12, 12).to(torch.bfloat16) * batch["prompt_mask"][..., None]
    return {"latents": latents, "context": context}


def clips(folder: Path, count: int = 7) -> VideoDataset:
    lines = ["video,prompt"]
    for number in range(count):
        if not (folder / f"{number}.mp4").exists():
            tall = number % 3 == 0
            write_clip(folder / f"{number}.mp4", frames=8 + number, height=64 if tall else 48, width=48 if tall else 64)
        lines.append(f"{number}.mp4,clip of {number} words")
    (folder / "m.csv").write_text("\n".join(lines))
    return open_clips(folder)


def open_clips(folder: Path, **options: Any) -> VideoDataset:
    config = {"data_path": folder / "m.csv", "buckets": [[5, 48, 64], [5, 64, 48]], **options}
    return VideoDataset(config, context())


def write(folder: Path, dataset: MapDataset, encoder: Any = encode, **arguments: Any) -> CacheReport:
    options = CacheOptions(micro_batch_size=2, shard_bytes=2_000)
    arguments = {"settings": SETTINGS, "tokenizer": WordTokenizer(), "options": options} | arguments
    return write_cache(folder, dataset, encoder, **arguments)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_batches_from_the_cache_equal_batches_from_clips(tmp_path: Path, dropout: float) -> None:
    """Same order, same conditions bit for bit, same captions dropped."""
    data = clips(tmp_path)
    done = write(tmp_path / "cache", data)
    assert (done.encoded, done.found, done.report.bad) == (7, 0, 0)
    assert len(list((tmp_path / "cache/shards").iterdir())) > 1
    cached = CachedDataset(tmp_path / "cache", dataset=data, settings=SETTINGS, caption_dropout=dropout)
    loader = BatchLoader(cached, micro_batch_size=2, seed=4, workers=WorkerOptions(num_workers=2))
    live = BatchLoader(open_clips(tmp_path, caption_dropout=dropout), micro_batch_size=2, seed=4)
    for ours, theirs in islice(zip(loader, live), 12):
        expected = encode(theirs)
        assert torch.equal(ours["sample_key"], theirs["sample_key"])
        for name, value in expected.items():
            assert ours["conditions"][name].dtype == value.dtype
            assert torch.equal(ours["conditions"][name], value)


def test_without_the_clips_it_is_used_as_it_is(tmp_path: Path) -> None:
    data = clips(tmp_path / "clips")
    write(tmp_path / "cache", data)
    with_clips = CachedDataset(tmp_path / "cache", dataset=data)
    shutil.rmtree(tmp_path / "clips")
    without = CachedDataset(tmp_path / "cache")
    assert [without.bucket(i) for i in range(7)] == [with_clips.bucket(i) for i in range(7)]
    assert [without.tokens(i) for i in range(7)] == [with_clips.tokens(i) for i in range(7)]


def test_what_changed_is_refused_by_name_and_encoded_anew(tmp_path: Path) -> None:
    """It was left out: one edited caption, and the run trained without that clip."""
    clips(tmp_path)
    write(tmp_path / "cache", open_clips(tmp_path))
    write_clip(tmp_path / "2.mp4", frames=9)
    (tmp_path / "m.csv").write_text((tmp_path / "m.csv").read_text().replace("clip of 4 words", "another caption"))
    with pytest.raises(
        DataError, match=r"2 of 7 samples are not in the cache, or .*: 2\.mp4, 4\.mp4; `mm-trainer cache`"
    ):
        CachedDataset(tmp_path / "cache", dataset=open_clips(tmp_path))
    calls: list[int] = []
    again = write(tmp_path / "cache", open_clips(tmp_path), counting(calls))
    assert (again.encoded, again.found) == (2, 5)
    assert len(CachedDataset(tmp_path / "cache", dataset=open_clips(tmp_path))) == 7


def test_other_settings_are_refused(tmp_path: Path) -> None:
    data = clips(tmp_path, 3)
    write(tmp_path / "cache", data)
    other = {"data": {"fps": 24}, "encoders": {"ae": "xyz"}}
    with pytest.raises(
        DataError, match=r"stale.*: data\.fps: 16 there, 24 here; encoders\.ae: 'abc' there, 'xyz' here"
    ):
        CachedDataset(tmp_path / "cache", settings=other)
    with pytest.raises(DataError, match="stale"):
        write(tmp_path / "cache", data, settings=other)
    for absent in ({"data": {"fps": 16}, "encoders": {"ae": None}}, {"data": {"fps": 16}}):
        with pytest.raises(DataError, match=r"stale.*: encoders\.ae: 'abc' there, (None|not stated) here"):
            CachedDataset(tmp_path / "cache", settings=absent)
    CachedDataset(tmp_path / "cache", settings={"data": {"fps": 16}, "encoders": {"ae": UNKNOWN}})
    with pytest.raises(DataError, match="1 variants per sample, not 2"):
        write(tmp_path / "cache", data, options=CacheOptions(variants=2))
    with pytest.raises(DataError, match="neither empty nor a cache"):
        write(tmp_path, data)
    with pytest.raises(DataError, match="no cache at /"):
        CachedDataset(tmp_path / "elsewhere")
    (tmp_path / "cache/index.safetensors").unlink()
    with pytest.raises(DataError, match="isn't finished"):
        CachedDataset(tmp_path / "cache")


def counting(calls: list[int]) -> Any:
    def count(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        calls.append(len(batch["video"]))
        return encode(batch)

    return count


def test_variants_hold_several_crops(tmp_path: Path) -> None:
    clips(tmp_path, 3)
    data = open_clips(tmp_path, clip_start="random")
    write(tmp_path / "cache", data, options=CacheOptions(variants=3, micro_batch_size=2))
    cached = CachedDataset(tmp_path / "cache", dataset=data)
    seen = {cached.load(2, key)["conditions"]["latents"].sum().item() for key in range(30)}
    wanted = {encode(one(data.load(2, 2 * 3 + variant)))["latents"].sum().item() for variant in range(3)}
    assert seen == wanted


def one(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[None] for name, value in sample.items() if isinstance(value, Tensor)}


def test_bad_clips_are_left_out_and_reported(tmp_path: Path) -> None:
    clips(tmp_path, 4)
    data = open_clips(tmp_path)
    (tmp_path / "1.mp4").unlink()
    done = write(tmp_path / "cache", data)
    assert (done.encoded, done.report.bad) == (3, 1)
    assert "no such file" in done.report.lines()[0]
    assert len(CachedDataset(tmp_path / "cache")) == 3
    beside = CachedDataset(tmp_path / "cache", dataset=data)
    assert (len(beside), beside.report.bad) == (3, 1), "bad is not stale"
    assert "no such file" in beside.report.lines()[0]
    write_clip(tmp_path / "1.mp4")
    with pytest.raises(DataError, match=r"1 of 4 samples .*: 1\.mp4; `mm-trainer cache`"):
        CachedDataset(tmp_path / "cache", dataset=open_clips(tmp_path))


def test_a_full_disk_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clips(tmp_path, 2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(DataError, match=r"GB are needed, 0\.0 GB are free"):
        write(tmp_path / "cache", data)


def test_a_killed_run_goes_on_where_it_stopped(run_ranks: Any, tmp_path: Path) -> None:
    """kill -9 in the middle, on two ranks; then on three ranks, of which some have nothing left to do."""
    clips(tmp_path)
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(write_on_ranks, 2, str(tmp_path), 9)
    shards = sorted(path.name for path in (tmp_path / "cache/shards").glob("*.safetensors"))
    assert shards
    before = {name: (tmp_path / "cache/shards" / name).read_bytes() for name in shards}
    results = run_ranks(write_on_ranks, 3, str(tmp_path), 0)
    assert len({calls for _, _, calls in results}) == 1  # every rank called the encoders equally often
    encoded, found, _ = results[0]
    assert encoded + found == 7
    assert found >= 1
    assert all((tmp_path / "cache/shards" / name).read_bytes() == content for name, content in before.items())
    data = open_clips(tmp_path)
    cached = CachedDataset(tmp_path / "cache", dataset=data)
    assert len(cached) == 7
    for index in range(7):
        expected = encode(one(data.load(index, index)))
        assert torch.equal(cached.load(index, index)["conditions"]["latents"], expected["latents"][0])


def write_on_ranks(rank: int, world_size: int, folder: str, kill_after: int) -> tuple[int, int, int]:
    calls: list[int] = []

    def encode_until_killed(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) == kill_after and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(batch)

    options = CacheOptions(micro_batch_size=1, shard_bytes=1)
    done = write(
        Path(folder) / "cache",
        open_clips(Path(folder)),
        encode_until_killed,
        options=options,
        data_rank=rank,
        data_size=world_size,
    )
    return done.encoded, done.found, len(calls)


def test_a_foreign_set_is_cached_too(tmp_path: Path) -> None:
    def encode_number(batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"latents": batch["number"][:, None].float()}

    data = NumberDataset([0] * 5 + [1] * 2, bad=[3])
    done = write(tmp_path / "cache", data, encode_number, tokenizer=None)
    assert (done.encoded, done.report.bad) == (6, 1)
    cached = CachedDataset(tmp_path / "cache")
    assert [cached.load(i, 0)["conditions"]["latents"].item() for i in range(6)] == [0, 1, 2, 4, 5, 6]
    with pytest.raises(DataError, match="needs the empty prompt"):
        CachedDataset(tmp_path / "cache", caption_dropout=0.1)


def test_text_is_stored_without_its_padding(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path / "cache", clips(tmp_path, 2))
    stored = [
        t for path in (tmp_path / "cache/shards").iterdir() for k, t in load_file(path).items() if k.endswith("context")
    ]
    assert {tuple(tensor.shape) for tensor in stored} == {(4, 12)}
    assert json.loads((tmp_path / "cache/cache.json").read_text())["settings"] == SETTINGS
    assert CachedDataset(tmp_path / "cache").load(0, 0)["conditions"]["context"].shape == (8, 12)


def test_damaged_files_of_the_cache_itself_are_named(tmp_path: Path) -> None:
    write(tmp_path / "cache", clips(tmp_path, 3))
    index = tmp_path / "cache/index.safetensors"
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"index\.safetensors: damaged .* run `mm-trainer cache` again"):
        CachedDataset(tmp_path / "cache")
    index.write_bytes(whole)
    (tmp_path / "cache/cache.json").write_text("")
    with pytest.raises(DataError, match=r"cache\.json: damaged"):
        CachedDataset(tmp_path / "cache")


def test_jobs_on_other_ranks_do_not_overwrite_each_others_shards(tmp_path: Path) -> None:
    keys = [f"{number:032x}" for number in range(4)]
    located = []
    for indices in ((0, 1), (0, 2)):
        writer = ShardWriter(tmp_path, keys, variants=1, padded=set(), shard_bytes=1 << 30, writes=True)
        for index in indices:
            writer.add([(index, index)], [Loaded({}, ())], {"x": torch.tensor([[float(index)]])})
        writer.flush()
        located.append(writer.located)
    for key, shard in (pair for part in located for pair in part.items()):
        assert f"{key}/0/x" in load_file(tmp_path / shard)
