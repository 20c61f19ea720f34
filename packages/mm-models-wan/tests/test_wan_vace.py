"""`processor: vace`: what a VACE-style model is conditioned on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mm_trainer.commands.prepare import prepare
from mm_trainer.config import load_config
from mm_trainer.contracts import DatasetContext, InputSpec
from mm_trainer.data import VideoDataset
from mm_trainer.data.batch import to_pixels
from mm_trainer.errors import ConfigError


def grey(level: int, height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), level, dtype=np.uint8)


def write_clip(path: Path, levels: list[int], height: int, width: int) -> None:
    """Frames of one grey each, so that a frame is told by its brightness."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for level in levels:
            frame = av.VideoFrame.from_ndarray(grey(level, height, width), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def brightness(video: torch.Tensor) -> list[float]:
    return ((video.float().mean((0, 2, 3)) + 1) * 127.5).tolist()


def test_vace_entries_share_one_view(tmp_path: Path) -> None:
    levels = [20 + 10 * n for n in range(20)]
    write_clip(tmp_path / "a.mp4", levels, 64, 128)
    write_clip(tmp_path / "depth.mp4", [level + 5 for level in levels], 32, 64)
    white_right = np.zeros((64, 128), dtype=np.uint8)
    white_right[:, 64:] = 255
    Image.fromarray(white_right).save(tmp_path / "mask.png")
    Image.fromarray(grey(0, 20, 60)).save(tmp_path / "ref.png")
    rows: list[dict[str, Any]] = [
        {"video": "a.mp4", "prompt": "", "mask": "mask.png", "source": "", "reference": "ref.png"},
        {"video": "a.mp4", "prompt": "", "mask": "", "source": "depth.mp4", "reference": ""},
    ]
    with (tmp_path / "m.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    options = {"data_path": tmp_path / "m.csv", "num_frames": 5, "buckets": [[48, 96]], "clip_start": "random"}
    data = VideoDataset(options | {"processor": "vace"}, DatasetContext(InputSpec(), None, seed=0))
    first, second = data.load(0, 5), data.load(1, 5)
    assert first["video"].shape == first["source_video"].shape == (3, 5, 48, 96)
    assert first["mask"].shape == (1, 5, 48, 96)
    assert first["mask"].unique().tolist() == [0.0, 1.0]
    assert first["source_video"][..., 50:].abs().max() == 0
    assert torch.equal(first["source_video"][..., :44], to_pixels(first["video"])[..., :44])
    assert first["reference_images"].shape == (1, 3, 48, 96)
    assert first["reference_images"][0, :, 0].min() == 1.0
    assert second["mask"].min() == 1.0
    shown = zip(brightness(second["source_video"]), brightness(to_pixels(second["video"])), strict=True)
    assert all(abs(source - clip - 5) < 3 for source, clip in shown), "the same five of twenty frames, 10 levels apart"
    assert second["reference_images"].shape == (0, 3, 48, 96)
    assert data.bucket(0) != data.bucket(1)


def test_no_model_here_reads_what_it_adds() -> None:
    """So it is refused before a run, in the training and the validation set."""
    for section in ("dataset_param", "val_dataset_param"):
        config = load_config("recipe:wan2_2/tiny_t2v", [f"data.{section}.processor=vace"])
        with pytest.raises(
            ConfigError, match="'vace' adds source_video, mask, reference_images, which no part"
        ) as info:
            prepare(config, 2, require_files=False)
        assert info.value.key == f"data.{section}.processor"
