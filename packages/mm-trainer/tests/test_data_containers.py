"""Containers and codecs as encoders write them by default: the frames read are those that were asked for.

Every frame shows its number (`data_clips.paint`), so a test sees which frames of the source a reader returned.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from data_clips import paint, read_numbers

from mm_trainer.data.video import decoding
from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.reader import MediaError, probe, read_frames

HEIGHT, WIDTH, FRAMES, RATE = 48, 64, 40, 16
B_FRAMES: Mapping[str, Mapping[str, str]] = {
    "libx264": {},
    "libx265": {"x265-params": "log-level=none"},
    "mpeg4": {"bf": "2"},
    "mpeg2video": {"bf": "2"},
}
"""Encoders that reorder frames, by default or when asked to."""
WITHOUT: Mapping[str, Mapping[str, str]] = {
    "libx264": {"bf": "0"},
    "mpeg4": {},
    "mjpeg": {},
    "ffv1": {},
    "libvpx": {},
    "libvpx-vp9": {},
    "libsvtav1": {},
    "wmv2": {},
    "flv": {},
    "gif": {},
    "prores_ks": {},
}
HOLDS: Mapping[str, tuple[str, ...]] = {
    "mp4": ("libx264", "libx265", "libsvtav1", "libvpx-vp9", "mpeg2video", "mpeg4", "mjpeg"),
    "mov": ("libx264", "mpeg4", "mpeg2video", "mjpeg", "prores_ks"),
    "mkv": ("libx264", "libx265", "mpeg4", "mpeg2video", "libvpx", "libvpx-vp9", "libsvtav1", "mjpeg", "ffv1"),
    "webm": ("libvpx", "libvpx-vp9", "libsvtav1"),
    "avi": ("libx264", "mpeg4", "mpeg2video", "mjpeg", "ffv1"),
    "wmv": ("libx264", "mpeg2video", "wmv2", "mpeg4"),
    "ts": ("libx264", "libx265", "mpeg2video", "mpeg4"),
    "flv": ("libx264", "libsvtav1", "flv"),
    "mpg": ("mpeg2video", "libx264"),
    "gif": ("gif",),
    "nut": ("libx264", "mpeg4"),
}
PIXELS = {"gif": "rgb8", "mjpeg": "yuvj420p", "prores_ks": "yuv422p10le"}
Case = tuple[str, str, str]
"""(suffix, codec, how its frames are ordered)"""
CASES: list[Case] = [
    (suffix, codec, order)
    for suffix, codecs in HOLDS.items()
    for codec in codecs
    for order, options in (("reordered", B_FRAMES), ("plain", WITHOUT))
    if codec in options
]


def write(path: Path, codec: str, options: Mapping[str, str], *, frames: int = FRAMES, gop: int | None = 12) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE, options=dict(options))
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, PIXELS.get(codec, "yuv420p")
        if codec != "libsvtav1":  # which refuses them together
            stream.bit_rate = 2_000_000
        if gop is not None:
            stream.codec_context.gop_size = gop
        for number in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(paint(number, HEIGHT, WIDTH), "rgb24")))
        container.mux(stream.encode())
    return path


def numbers_at(path: Path, times: list[float], **options: Any) -> list[int]:
    crop = Crop(HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH)
    return read_numbers(torch.from_numpy(read_frames(path, times, crop, **options)))


def check(path: Path, frames: int = FRAMES) -> None:
    """Every start and both rates: the numbers are those of the source."""
    info = probe(path)
    assert info.frames == frames
    assert info.fps == pytest.approx(RATE, rel=0.01)
    for start, step in itertools.product((0, 1, frames // 2, frames - 2), (1, 2)):
        wanted = list(range(start, min(frames, start + 9), step))
        times = [number / info.fps for number in wanted]
        assert numbers_at(path, times) == wanted, (start, step)


@pytest.mark.parametrize(
    ("suffix", "codec", "order"),
    [pytest.param(*case, id="-".join(case)) for case in CASES],
)
def test_the_right_frames(tmp_path: Path, suffix: str, codec: str, order: str) -> None:
    options = (B_FRAMES if order == "reordered" else WITHOUT)[codec]
    check(write(tmp_path / f"clip.{suffix}", codec, options))


def restate_duration(source: Path, target: Path, change: Callable[[int, int], int]) -> Path:
    """Another duration in the track header of an mp4: change(duration, timescale) → duration."""
    data = bytearray(source.read_bytes())
    at = data.find(b"mdhd")
    scale, duration = struct.unpack(">II", data[at + 16 : at + 24])
    data[at + 20 : at + 24] = struct.pack(">I", change(duration, scale))
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("factor", [0.03, 0.5, 3])
def test_a_wrong_duration_in_the_header_is_not_believed(tmp_path: Path, factor: float) -> None:
    source = write(tmp_path / "right.mp4", "libx264", {}, frames=65)
    check(restate_duration(source, tmp_path / "wrong.mp4", lambda duration, _: int(duration * factor)), frames=65)


@pytest.mark.parametrize("start", [Fraction(1, 2), Fraction(13, 8)])
def test_frames_before_an_edit_list_are_not_counted(tmp_path: Path, start: Fraction) -> None:
    """A lossless trim keeps the lead-in from the last key frame in the file, hidden."""
    source = write(tmp_path / "whole.mp4", "libx264", {}, frames=60, gop=60)
    target, hidden = tmp_path / "cut.mp4", int(start * RATE)
    with av.open(str(source)) as reading, av.open(str(target), "w") as writing:
        stream = reading.streams.video[0]
        copy, offset = writing.add_stream_from_template(stream), int(start / stream.time_base)
        for packet in reading.demux(stream):
            if packet.dts is not None:
                packet.pts -= offset
                packet.dts -= offset
                packet.stream = copy
                writing.mux(packet)
    assert probe(target).frames == 60 - hidden
    for first in (0, 5, 20):
        times = [(first + number) / RATE for number in range(5)]
        assert numbers_at(target, times) == list(range(hidden + first, hidden + first + 5))
    with pytest.raises(MediaError, match="cut off"):
        numbers_at(target, [(60 - hidden + 2) / RATE])


def test_open_groups_of_pictures(tmp_path: Path) -> None:
    """Frames shown before a key frame may follow it in the file, and refer to what came before it."""
    options = {"x264-params": "open-gop=1:keyint=10:min-keyint=10:bframes=3:b-adapt=0:scenecut=0"}
    for suffix in ("mp4", "mkv", "ts"):
        check(write(tmp_path / f"open.{suffix}", "libx264", options, gop=None))


@pytest.mark.parametrize(
    ("suffix", "codec", "options", "slow"),
    [("mp4", "libx264", {}, 0), ("webm", "libsvtav1", {}, 0), ("avi", "libx264", {}, 1), ("mpg", "mpeg2video", {}, 1)],
)
def test_the_slow_way_is_told(tmp_path: Path, suffix: str, codec: str, options: dict[str, str], slow: int) -> None:
    path, told = write(tmp_path / f"clip.{suffix}", codec, options), []
    assert numbers_at(path, [1.0, 1.0625], on_slow=lambda: told.append(1)) == [16, 17]
    assert len(told) == slow


def test_a_decoder_that_leaves_out_what_is_wanted_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libdav1d reads `skip_frame` once: taken for one that reads it for every packet, it loses every second frame."""
    path, told = write(tmp_path / "clip.webm", "libsvtav1", {}), []
    monkeypatch.setattr(decoding, "SKIPPING", (*decoding.SKIPPING, "libdav1d"))
    assert numbers_at(path, [n / 16 for n in range(10, 15)], on_slow=lambda: told.append(1)) == [*range(10, 15)]
    assert told == [1]


def test_times_that_jump_back_are_a_reason(tmp_path: Path) -> None:
    """Two recordings one after the other in one stream: nobody can say what is shown when."""
    first = write(tmp_path / "a.ts", "libx264", {"bf": "0"}).read_bytes()
    (tmp_path / "both.ts").write_bytes(first + first)
    assert numbers_at(tmp_path / "both.ts", [0.0, 1.0]) == [0, 16]
    with pytest.raises(MediaError, match=r"its times jump back after 2\.\d+ s|cut off"):
        numbers_at(tmp_path / "both.ts", [4.0])
