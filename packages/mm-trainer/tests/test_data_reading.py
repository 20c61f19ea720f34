"""Which frames arrive for which times, and in which colours: clips with the frame number painted in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_clips import paint, read_number, read_numbers, write_audio, write_clip

from mm_trainer.data.batch import to_pixels
from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.reader import MediaError, probe, read_frames, read_image, read_still


def frames_at(path: Path, times: list[float], height: int = 48, width: int = 64) -> torch.Tensor:
    return torch.from_numpy(read_frames(path, times, whole(height, width)))


def whole(height: int, width: int) -> Crop:
    return Crop(height, width, 0, 0, height, width)


def numbers_at(path: Path, times: list[float]) -> list[int]:
    return read_numbers(frames_at(path, times))


def grid(fps: float, count: int, start: float = 0.0) -> list[float]:
    return [start + number / fps for number in range(count)]


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
@pytest.mark.parametrize("rate", [16, 24, 30])
def test_constant_rates_to_16_fps(tmp_path: Path, rate: int, codec: str) -> None:
    """B059, B067: each picked frame is the one nearest to the wanted time."""
    path = write_clip(tmp_path / "a.mp4", frames=60, fps=rate, codec=codec)
    info = probe(path)
    count = info.frames_at(16)
    assert count == 60 * 16 // rate
    ideal = np.array(grid(16, count)) * rate
    assert np.abs(np.array(numbers_at(path, grid(16, count))) - ideal).max() <= 0.5


def test_counts_are_exact() -> None:
    """B059, B060, with the rounding that containers do to durations."""
    from mm_trainer.data.video.reader import MediaInfo

    def count(frames: int, fps: float, target: float, error: float = 0.0) -> int:
        return MediaInfo(64, 48, frames, fps, frames / fps + error).frames_at(target)

    assert count(101, 24, 16) == 67
    assert count(65, 16, 16) == count(65, 16, 16, -0.001) == count(65, 16, 16, 0.001) == 65
    assert count(65, 30, 30, -0.001) == 65
    assert count(90, 30000 / 1001, 30000 / 1001) == 90


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_65_frames_stay_65(tmp_path: Path, suffix: str) -> None:
    """B060"""
    for rate in (16, 30):
        path = write_clip(tmp_path / f"{rate}{suffix}", frames=65, fps=rate)
        assert probe(path).frames_at(rate) == 65
        assert numbers_at(path, grid(rate, 65)) == list(range(65))


@pytest.mark.parametrize(
    ("suffix", "codec", "pix_fmt"),
    [
        (".mov", "mpeg4", "yuv420p"),
        (".avi", "mpeg4", "yuv420p"),
        (".ts", "libx264", "yuv420p"),
        (".webm", "libvpx-vp9", "yuv420p"),
        (".mkv", "libx264", "yuv420p"),
        (".mp4", "mjpeg", "yuvj420p"),
        (".gif", "gif", "rgb8"),
    ],
)
def test_every_container_gives_its_frames(tmp_path: Path, suffix: str, codec: str, pix_fmt: str) -> None:
    """Some start late, some don't say how long they are, and some don't know the length of their last frame."""
    path = write_clip(tmp_path / f"a{suffix}", frames=40, codec=codec, pix_fmt=pix_fmt)
    assert probe(path).frames_at(16) == 40
    assert numbers_at(path, grid(16, 40)) == list(range(40))
    assert numbers_at(path, grid(16, 5, 1.5)) == [24, 25, 26, 27, 28]


def test_variable_rate_gives_the_frame_of_the_moment(tmp_path: Path) -> None:
    """B067: 20 frames at 30 fps, then 20 at 10 fps; at 10 fps that is 27 frames."""
    path = write_clip(tmp_path / "a.mp4", durations=[1 / 30] * 20 + [1 / 10] * 20)
    info = probe(path)
    assert info.frames == 40
    assert info.frames_at(10) == 26
    shown = np.cumsum([0.0] + [1 / 30] * 20 + [1 / 10] * 19)
    for number, time in zip(numbers_at(path, grid(10, 26)), grid(10, 26), strict=True):
        assert abs(shown[number] - time) <= (1 / 30 if time < 20 / 30 else 1 / 10) / 2 + 1e-4


@pytest.mark.parametrize("start", [0.0, 1.0, 2.5, 5.9])
def test_seeking_into_a_clip_gives_the_same_frames(tmp_path: Path, start: float) -> None:
    path = write_clip(tmp_path / "a.mp4", frames=120, fps=16, codec="libx264", gop=24)
    expected = [round(start * 16) + k for k in range(min(9, 120 - round(start * 16)))]
    assert numbers_at(path, grid(16, len(expected), start)) == expected


def test_seeking_decodes_no_more_than_the_group_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mm_trainer.data.video import reader

    path = write_clip(tmp_path / "a.mp4", frames=120, fps=16, gop=12)
    decoded = []

    def counting(*arguments: Any, decode: Any = reader.fast_frames) -> Iterator[Any]:
        for shown in decode(*arguments):
            decoded.append(shown)
            yield shown

    monkeypatch.setattr(reader, "fast_frames", counting)
    assert numbers_at(path, grid(16, 5, 5.0)) == [80, 81, 82, 83, 84]
    assert len(decoded) <= 12 + 5 + 1


def test_what_no_frame_needs_is_not_decoded(tmp_path: Path) -> None:
    """30 to 10 fps with B-frames: two of three aren't wanted, and what comes is what decoding them all gives."""
    import av

    from mm_trainer.data.video.decoding import fast_frames

    path = write_clip(tmp_path / "a.mp4", frames=60, fps=30, codec="libx264")
    times = grid(10, 20)
    with av.open(str(path)) as container:
        everything = {round(f.time * 30): f.to_ndarray(format="gbrp") for f in container.decode(video=0)}
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        some = list(fast_frames(container, container.streams.video[0], times))
    numbers = {round(shown.time * 30): shown.frame.to_ndarray(format="gbrp") for shown in some}
    assert len(everything) == 60
    assert set(range(0, 60, 3)) <= numbers.keys()
    assert len(numbers) < 50
    assert all(np.array_equal(frame, everything[number]) for number, frame in numbers.items())


def test_faster_than_the_source_repeats_frames(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", frames=8, fps=8)
    assert probe(path).frames_at(16) == 16
    assert set(numbers_at(path, grid(16, 16))) == set(range(8))


@pytest.mark.parametrize(("rotation", "corner"), [(None, "left"), (90, "bottom"), (-90, "top"), (180, "right")])
def test_rotation_is_applied(tmp_path: Path, rotation: int | None, corner: str) -> None:
    """A frame that is white on its left; turned counter-clockwise by 90 degrees the white is at the bottom."""
    image = np.zeros((48, 64, 3), dtype=np.uint8)
    image[:, :32] = 255
    path = write_clip(tmp_path / "a.mp4", images=[image] * 3, rotation=rotation)
    info = probe(path)
    upright = rotation in (None, 180)
    assert (info.height, info.width) == ((48, 64) if upright else (64, 48))
    frame = frames_at(path, [0.0], info.height, info.width)[:, 0].double().mean(0)
    halves = {
        "left": frame[:, : frame.shape[1] // 2],
        "right": frame[:, frame.shape[1] // 2 :],
        "top": frame[: frame.shape[0] // 2],
        "bottom": frame[frame.shape[0] // 2 :],
    }
    assert max(halves, key=lambda name: halves[name].mean()) == corner


def test_odd_sizes_grey_and_one_frame(tmp_path: Path) -> None:
    """B070, B071"""
    odd = write_clip(tmp_path / "odd.mkv", frames=2, height=49, width=65, codec="ffv1", pix_fmt="yuv444p")
    assert (probe(odd).height, probe(odd).width) == (49, 65)
    grey = write_clip(tmp_path / "grey.mkv", frames=3, codec="ffv1", pix_fmt="gray")
    assert numbers_at(grey, grid(16, 3)) == [0, 1, 2]
    single = write_clip(tmp_path / "single.mp4", frames=1)
    assert probe(single).frames_at(16) == 1
    assert numbers_at(single, [0.0]) == [0]


def test_alpha_is_laid_over_white(tmp_path: Path) -> None:
    """B071"""
    rgba = np.zeros((48, 64, 4), dtype=np.uint8)
    rgba[:, 32:, 3] = 255
    path = write_clip(tmp_path / "a.mov", images=[rgba] * 2, codec="qtrle", pix_fmt="argb")
    frame = frames_at(path, [0.0])[:, 0]
    assert frame[:, 24, 8].tolist() == [255, 255, 255]
    assert frame[:, 24, 56].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "I;16", "CMYK", "1"])
def test_every_kind_of_image_is_rgb(tmp_path: Path, mode: str) -> None:
    """B071: the left half is black, the right half white, or transparent over white."""
    from PIL import Image

    half = np.zeros((48, 64), dtype=np.uint8)
    half[:, 32:] = 255
    if mode == "I;16":
        image = Image.fromarray(half.astype(np.uint16) * 257)
    elif mode in ("RGBA", "LA"):
        alpha = Image.fromarray(255 - half)  # black everywhere, the right half transparent
        image = Image.new(mode[:-1], (64, 48))
        image.putalpha(alpha)
    else:
        image = Image.fromarray(half).convert("RGB").convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path)
    loaded = read_image(path)
    assert loaded.shape == (48, 64, 3)
    assert loaded.dtype == np.uint8
    assert loaded[:, :30].max() <= 2
    assert loaded[:, 34:].min() >= 253


def test_image_orientation_is_applied(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(paint(1, 48, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by 90 degrees
    image.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (64, 48, 3)


def test_resize_keeps_a_number_readable() -> None:
    still = torch.from_numpy(read_still(paint(37, 96, 128), whole(32, 48)))
    assert still.shape == (3, 1, 32, 48)
    assert read_number(still[:, 0]) == 37


def test_colours_are_in_order_and_crops_exact(tmp_path: Path) -> None:
    image = np.zeros((48, 64, 3), dtype=np.uint8)
    image[:24, :, 0], image[24:, :, 1], image[:, 32:, 2] = 200, 150, 100
    path = write_clip(tmp_path / "a.mkv", images=[image] * 2, codec="ffv1", pix_fmt="bgr0")
    assert np.array_equal(read_frames(path, [0.0], whole(48, 64))[:, 0].transpose(1, 2, 0), image)
    part = read_frames(path, [0.0], Crop(48, 64, top=10, left=20, kept_height=32, kept_width=16))
    assert np.array_equal(part[:, 0].transpose(1, 2, 0), image[10:42, 20:36])
    assert np.array_equal(read_still(image, whole(48, 64))[:, 0].transpose(1, 2, 0), image)


def test_values_span_minus_one_to_one() -> None:
    frames = torch.tensor([0, 127, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(to_pixels(frames).flatten(), torch.tensor([-1.0, 127 / 127.5 - 1, 1.0]))


def test_bytes_become_pixels_on_the_way_to_the_device() -> None:
    from mm_trainer.data.batch import to_device

    batch = {"video": torch.full((1, 3, 1, 2, 2), 255, dtype=torch.uint8), "ids": torch.ones(2, 3, dtype=torch.uint8)}
    moved = to_device({**batch, "nested": batch, "text": ["a"]}, torch.device("cpu"))
    for video, ids in ((moved["video"], moved["ids"]), (moved["nested"]["video"], moved["nested"]["ids"])):
        assert torch.equal(video, torch.ones(1, 3, 1, 2, 2))
        assert ids.dtype == torch.uint8
    assert torch.equal(to_device(moved, torch.device("cpu"))["video"], moved["video"])


def test_cut_off_files_say_so(tmp_path: Path) -> None:
    """B064: cut to 60 % with the index at the end (can't be opened) and at the front (ends early)."""
    whole = write_clip(tmp_path / "whole.mp4", frames=60, codec="mpeg4")
    (tmp_path / "back.mp4").write_bytes(whole.read_bytes()[: int(whole.stat().st_size * 0.6)])
    front = write_clip(tmp_path / "front.mp4", frames=60, codec="mpeg4", options={"movflags": "faststart"})
    front.write_bytes(front.read_bytes()[: int(front.stat().st_size * 0.6)])
    (tmp_path / "zero.mp4").touch()
    with pytest.raises(MediaError, match="can't be read: Invalid data"):
        probe(tmp_path / "back.mp4")
    with pytest.raises(MediaError, match="can't be read: Invalid data"):
        probe(tmp_path / "zero.mp4")
    with pytest.raises(MediaError, match="cut off|damaged|can't be read"):
        numbers_at(front, grid(16, 60))
    assert numbers_at(front, grid(16, 9)) == list(range(9))


def test_the_last_frames_of_a_decoder_that_holds_some_back(tmp_path: Path) -> None:
    """H.264 with B-frames: they come out when the file is at its end, and don't know their time base any more."""
    path = write_clip(tmp_path / "a.mp4", frames=20, fps=10, codec="libx264")
    assert numbers_at(path, [1.7, 1.84, 1.99]) == [17, 18, 19]
    with pytest.raises(MediaError, match=r"cut off: its frames end at 2\.\d+ s, 2\.30 s is needed"):
        numbers_at(path, [1.7, 2.3])


def test_files_without_a_usable_video_stream(tmp_path: Path) -> None:
    """B066"""
    with pytest.raises(MediaError, match="no video stream"):
        probe(write_audio(tmp_path / "audio_only.mp4"))
    path = write_clip(tmp_path / "odd_codec.mkv", frames=3)
    path.write_bytes(path.read_bytes().replace(b"V_MPEG4/ISO/ASP", b"V_UNKNOWN/CODEC"))
    with pytest.raises(MediaError, match="can't decode: no decoder"):
        probe(path)
    with pytest.raises(MediaError, match="no such file"):
        probe(tmp_path / "missing.mp4")
    with pytest.raises(MediaError, match="remote locations can't be read"):
        probe(tmp_path / "https://example.org/a.mp4")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(MediaError, match="can't read the image"):
        read_image(tmp_path / "text.png")


def test_av1_is_read(tmp_path: Path) -> None:
    """B066: the codec is one that FFmpeg here decodes, so it is treated like any other."""
    path = write_clip(tmp_path / "a.mp4", frames=4, codec="libsvtav1", height=64, width=64)
    assert probe(path).frames == 4


@pytest.mark.parametrize(("suffix", "settings"), [(".png", {}), (".webp", {"lossless": True}), (".tif", {})])
def test_animated_images_are_named_and_not_trained_as_a_still(tmp_path: Path, suffix: str, settings: dict) -> None:
    from PIL import Image

    first, *rest = [Image.fromarray(paint(number, 48, 64)) for number in range(5)]
    first.save(tmp_path / f"a{suffix}", save_all=True, append_images=rest, **settings)
    with pytest.raises(MediaError, match="holds 5 images, of which a still would show one"):
        read_image(tmp_path / f"a{suffix}")
    first.save(tmp_path / f"b{suffix}", **settings)
    assert read_image(tmp_path / f"b{suffix}").shape == (48, 64, 3)
