"""`VideoDataset`: which frames arrive, in which shape, with which text."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data_clips import context, read_numbers, write_clip

from mm_trainer.data.loader import BatchLoader, WorkerOptions
from mm_trainer.data.video import VideoDataset
from mm_trainer.errors import DataError


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
    assert sample["video"].dtype == torch.float32
    assert sample["video"].min() >= -1
    assert sample["video"].max() <= 1
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
    assert sorted(batches[0]["caption"] + batches[1]["caption"]) == [f"clip {number}" for number in range(4)]
    assert batches[0]["sample_key"].dtype == torch.int64


@pytest.mark.parametrize("num_frames", [80, 0])
def test_frame_counts_off_the_rule_are_refused(tmp_path: Path, num_frames: int) -> None:
    """B061"""
    write_clip(tmp_path / "a.mp4", frames=4)
    expected = "nearest 77 or 81" if num_frames else "greater than or equal to 1"
    with pytest.raises(DataError, match=expected):
        open_set(tmp_path, [{"video": "a.mp4", "prompt": ""}], num_frames=num_frames)
