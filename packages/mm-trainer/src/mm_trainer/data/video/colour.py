"""What the numbers of a frame mean: matrix, range, depth and transfer, and HDR shown as SDR.

[Note: colour] swscale honours the matrix and the range that a frame states, and nothing else: the transfer function is
left as it is, a missing matrix is taken for BT.601 at any size, and some matrices it can't undo. So what is missing is
stated here as players do, what can't be undone is refused, and PQ and HLG are brought to SDR:

1. to linear light in nits (ITU-R BT.2100: PQ; HLG with the OOTF of a display of 1,000 nits, gamma 1.2);
2. highlights above the knee of BT.2390 are rolled off, from 1,000 to 203 nits, on the largest of R, G and B so that
   hues stay (203 nits is SDR white, BT.2408);
3. primaries from BT.2020 to BT.709 (BT.2087), clipped;
4. the inverse of BT.1886, the display that SDR video is shown on.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.video.safe_open import MediaError

Hdr = Literal["tonemap", "skip", "error"]

PQ, HLG = 16, 18
"""``color_trc`` of HDR, as ITU-T H.273 numbers it."""
IDENTITY, BT_709, UNSPECIFIED, BT_2020 = 0, 1, 2, 9
NOT_UNDONE = {
    3: "a reserved matrix",
    8: "YCgCo",
    10: "BT.2020 with constant luminance",
    11: "YDzDx",
    12: "a matrix of their primaries",
    13: "a matrix of their primaries",
    14: "ICtCp",
}
"""Matrices that swscale refuses, or takes for another, by H.273's number."""
HD_WIDTH, HD_HEIGHT = 1280, 576
"""Where nothing is stated: from this width on, or above this height, video is BT.709."""

WHITE, PEAK = 203.0, 1000.0
"""Nits of SDR white, and of the HDR display that is assumed."""
TO_709 = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32)
LUMA_2020 = np.array([0.2627, 0.6780, 0.0593], np.float32)


def settle(frame: Any) -> None:
    """State the matrix of a frame that doesn't, by its transfer and primaries, else by its size.

    Raises:
        MediaError: its colours can't be converted.
    """
    if frame.format.is_rgb:
        return
    matrix = int(frame.colorspace)
    if matrix in NOT_UNDONE:
        raise MediaError(f"its colours are stored as {NOT_UNDONE[matrix]}, which can't be converted here")
    if matrix in (UNSPECIFIED, IDENTITY):  # which says RGB, and the frame isn't
        if transfer_of(frame) is not None or int(frame.color_primaries) == BT_2020:
            frame.colorspace = BT_2020
        elif frame.width >= HD_WIDTH or frame.height > HD_HEIGHT:
            frame.colorspace = BT_709


def transfer_of(frame: Any) -> int | None:
    """`PQ` or `HLG`; None for a frame that isn't HDR."""
    transfer = int(frame.color_trc)
    return transfer if transfer in (PQ, HLG) else None


def is_deep(frame: Any) -> bool:
    """Whether a component has more than 8 bits; swscale's quick way truncates those, by 1.6 of 255 on average."""
    return any(component.bits > 8 for component in frame.format.components)


def to_sdr(code: NDArray[np.uint16], transfer: int) -> NDArray[np.uint8]:
    """(H, W, 3) 16-bit HDR code of BT.2020 primaries → (H, W, 3) 8-bit RGB of BT.709; see [Note: colour]."""
    if transfer == PQ:
        nits = _pq_table()[code]
    else:
        scene = _hlg_table()[code]
        luma = np.maximum(scene @ LUMA_2020, 1e-6)[..., None]
        nits = PEAK * luma**0.2 * scene
    brightest = nits.max(-1)
    nits = nits * np.interp(brightest, *_roll_off())[..., None].astype(np.float32)
    linear = np.clip((nits / WHITE) @ TO_709.T, 0, 1)
    return (255 * linear ** (1 / 2.4) + 0.5).astype(np.uint8)


@cache
def _pq_table() -> NDArray[np.float32]:
    return pq_to_nits(np.arange(65536) / 65535).astype(np.float32)


@cache
def _hlg_table() -> NDArray[np.float32]:
    """Inverse OETF of BT.2100: scene light in [0, 1]."""
    signal = np.arange(65536) / 65535
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12).astype(np.float32)


@cache
def _roll_off() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nits of the brightest component, ascending → the factor on all three (BT.2390, section 5.4)."""
    nits = np.concatenate([[0.0], np.geomspace(1.0, 10_000.0, 4096)])
    top = nits_to_pq(PEAK)
    signal = np.minimum(nits_to_pq(nits) / top, 1)
    largest = nits_to_pq(WHITE) / top
    knee = 1.5 * largest - 0.5
    t = np.clip((signal - knee) / (1 - knee), 0, 1)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (-2 * t**3 + 3 * t**2) * largest
    shown = pq_to_nits(np.where(signal < knee, signal, spline) * top)
    return nits, np.where(nits > 0, shown / np.maximum(nits, 1e-9), 1.0)


def pq_to_nits(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """EOTF of SMPTE ST 2084; signal in [0, 1]."""
    m1, m2, c1, c2, c3 = _PQ
    power = np.asarray(signal, np.float64) ** (1 / m2)
    return 10_000 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)


def nits_to_pq(nits: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """The inverse of `pq_to_nits`."""
    m1, m2, c1, c2, c3 = _PQ
    power = (np.asarray(nits, np.float64) / 10_000) ** m1
    return ((c1 + c2 * power) / (1 + c3 * power)) ** m2


_PQ = (2610 / 16384, 78.84375, 0.8359375, 18.8515625, 18.6875)
