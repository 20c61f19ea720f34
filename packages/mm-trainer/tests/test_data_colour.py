"""Side information that gives a frame's numbers their meaning: matrix, depth, transfer. Golden values are not ours.

Those of HDR follow from ITU-R BT.2100, BT.2390, BT.2020 and BT.1886 (`clips.md` of the measurements: knee, BT.1886).
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.colour import HLG, PQ, nits_to_pq, pq_to_nits
from mm_trainer.data.video.reader import read_frames
from mm_trainer.data.video.safe_open import MediaError
from mm_trainer.errors import DataError


def write_flat(
    path: Path,
    planes: tuple[int, ...],
    *,
    pix_fmt: str = "yuv420p10le",
    size: tuple[int, int] = (48, 64),
    codec: str = "ffv1",
    **tags: int,
) -> Path:
    """Three frames of one colour, given as the numbers that are stored."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16)
        stream.height, stream.width, stream.pix_fmt = *size, pix_fmt
        for name, value in {"color_range": 1, **tags}.items():
            setattr(stream.codec_context, name, value)
        for number in range(3):
            frame = av.VideoFrame(size[1], size[0], pix_fmt)
            frame.pts, frame.time_base = number, Fraction(1, 16)
            kind: Any = np.uint16 if "10" in pix_fmt else np.uint8
            for plane, value in zip(frame.planes, planes, strict=True):
                plane.update(np.full(plane.buffer_size // np.dtype(kind).itemsize, value, kind).tobytes())
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def colour_of(path: Path, size: tuple[int, int] = (48, 64), **options: Any) -> list[int]:
    """RGB in the middle of the first frame."""
    height, width = size
    frame = read_frames(path, [0.0], Crop(height, width, 0, 0, height, width), **options)[:, 0]
    return frame[:, height // 2, width // 2].tolist()


HDR = {"colorspace": 9, "color_primaries": 9}


@pytest.mark.parametrize(
    ("transfer", "luma", "expected"),
    [(PQ, 400, 110), (PQ, 509, 189), (PQ, 572, 230), (PQ, 650, 252), (HLG, 502, 143), (HLG, 650, 205), (HLG, 721, 230)],
)
def test_hdr_grey_is_shown_as_an_sdr_display_would(tmp_path: Path, transfer: int, luma: int, expected: int) -> None:
    """It was read as SDR: white came out at 148 (PQ) or 191 (HLG)."""
    path = write_flat(tmp_path / "hdr.mkv", (luma, 512, 512), color_trc=transfer, **HDR)
    assert np.abs(np.array(colour_of(path)) - expected).max() <= 1


@pytest.mark.parametrize("size", [(48, 64), (720, 1280)])
def test_hdr_without_a_matrix_has_the_hue_of_one_that_states_it(tmp_path: Path, size: tuple[int, int]) -> None:
    saturated = (300, 450, 700)
    stated = write_flat(tmp_path / "stated.mkv", saturated, size=size, color_trc=PQ, **HDR)
    silent = write_flat(tmp_path / "silent.mkv", saturated, size=size, color_trc=PQ)
    red, green, blue = colour_of(stated, size)
    assert red > max(green, blue) + 50
    assert colour_of(silent, size) == [red, green, blue]


@pytest.mark.parametrize(("alpha", "expected"), [(0, 255), (1023, 143)])
def test_hdr_with_alpha_lies_over_white(tmp_path: Path, alpha: int, expected: int) -> None:
    planes = (502, 512, 512, alpha)
    path = write_flat(tmp_path / "a.mkv", planes, pix_fmt="yuva444p10le", color_trc=HLG, **HDR)
    assert np.abs(np.array(colour_of(path)) - expected).max() <= 1


def test_an_rgb_matrix_on_a_frame_that_is_not_rgb_states_nothing(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "a.mkv", (63, 102, 240), pix_fmt="yuv420p", size=(720, 1280), colorspace=0)
    red, green, blue = colour_of(path, (720, 1280))
    assert red >= 252
    assert max(green, blue) <= 3


def test_the_curve_is_that_of_the_standard() -> None:
    """Values of ST 2084 and BT.2408."""
    np.testing.assert_allclose(nits_to_pq(np.array([100, 203, 1000])), [0.5081, 0.5807, 0.7518], atol=1e-4)
    np.testing.assert_allclose(pq_to_nits(nits_to_pq(np.array([0.01, 1, 5000]))), [0.01, 1, 5000], rtol=1e-9)


def test_hdr_may_be_left_out_or_stop_the_run(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "hdr.mkv", (572, 512, 512), color_trc=PQ, **HDR)
    with pytest.raises(MediaError, match=r"HDR \(PQ\), which hdr: skip leaves out"):
        colour_of(path, hdr="skip")
    with pytest.raises(DataError, match=r"a clip is HDR \(PQ\), and hdr: error stops the run"):
        colour_of(path, hdr="error")


@pytest.mark.parametrize(
    ("size", "tags", "expected"),
    [
        # Y'CbCr (81, 90, 240) is pure red in BT.601; in BT.709 that is (63, 102, 240).
        ((48, 64), {}, (81, 90, 240)),
        ((576, 720), {}, (81, 90, 240)),
        ((720, 1280), {}, (63, 102, 240)),
        ((1280, 720), {}, (63, 102, 240)),
        ((48, 64), {"colorspace": 1}, (63, 102, 240)),
        ((720, 1280), {"colorspace": 6}, (81, 90, 240)),
    ],
)
def test_red_is_red_where_no_matrix_is_stated(
    tmp_path: Path, size: tuple[int, int], tags: dict[str, int], expected: tuple[int, int, int]
) -> None:
    path = write_flat(tmp_path / "red.mkv", expected, pix_fmt="yuv420p", size=size, **tags)
    red, green, blue = colour_of(path, size)
    assert red >= 252
    assert max(green, blue) <= 3


@pytest.mark.parametrize("code", [64, 200, 437, 502, 777, 940])
def test_ten_bits_are_rounded_and_not_cut(tmp_path: Path, code: int) -> None:
    """swscale's quick way is 1.6 of 255 too dark on average."""
    path = write_flat(tmp_path / "grey.mkv", (code, 512, 512), colorspace=1, color_trc=1)
    exact = (code - 64) / (940 - 64) * 255
    assert np.abs(np.array(colour_of(path)) - exact).max() <= 1


@pytest.mark.parametrize(("matrix", "name"), [(8, "YCgCo"), (14, "ICtCp")])
def test_a_matrix_that_cannot_be_undone_is_a_reason(tmp_path: Path, matrix: int, name: str) -> None:
    path = write_flat(tmp_path / "odd.mkv", (81, 90, 240), pix_fmt="yuv420p", colorspace=matrix)
    with pytest.raises(MediaError, match=f"its colours are stored as {name}, which can't be converted here"):
        colour_of(path)
