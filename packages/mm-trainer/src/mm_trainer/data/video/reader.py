"""Reading frames from video and image files by presentation time.

A clip is read on an even grid of times; at each, the frame nearest in time is taken, so a variable frame rate or odd
timestamps do no harm. How frames get their times: [Note: what a file states] in `mm_trainer.data.video.decoding`.
Files are opened inside the call and closed before it returns: no decoder outlives a sample or crosses a fork.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.metadata.folder import IMAGE_SUFFIXES
from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.colour import PQ, Hdr, is_deep, settle, to_sdr, transfer_of
from mm_trainer.data.video.decoding import (
    RATE_TOLERANCE,
    Doubt,
    Extent,
    fast_frames,
    has_index,
    measure,
    nearest,
    sure_frames,
)
from mm_trainer.data.video.safe_open import MediaError, open_image, open_video
from mm_trainer.errors import DataError

if TYPE_CHECKING:
    from av.container import InputContainer

EXIF_ORIENTATION, EXIF_TURNED = 0x0112, (5, 6, 7, 8)
ASPECT_TOLERANCE = 0.05
"""Relative: sizes rounded to multiples of 16 differ by a few percent, which nobody sees."""


@dataclass(frozen=True)
class MediaInfo:
    """What a file holds, upright as a player would show it."""

    width: int
    """Pixels, rotation and pixel aspect applied."""
    height: int
    frames: int
    fps: float
    """Average rate; 0 for an image."""
    duration: float
    """Seconds from the first frame's start to the last frame's end; 0 for an image."""

    def frames_at(self, fps: float | None) -> int:
        """How many frames the clip gives at a rate (frames per second; None: its own)."""
        if self.fps == 0:
            return 1
        if fps is None:
            return self.frames
        return max(1, math.floor(self.duration * fps + RATE_TOLERANCE))


def is_image(path: str | Path) -> bool:
    """Whether a file is read as an image, by its suffix."""
    return Path(path).suffix.lower() in IMAGE_SUFFIXES


def probe(path: str | Path) -> MediaInfo:
    """Look at a file: its header, and a video's first frame, since rotation is a frame's property.

    Raises:
        MediaError: it can't be opened or decoded.
    """
    if is_image(path):
        height, width = _image_size(path)
        return MediaInfo(width=width, height=height, frames=1, fps=0.0, duration=0.0)
    with open_video(path) as (container, stream):
        extent = measure(container, stream)
        if has_index(container, stream):  # so nothing has been read yet
            return _info(container, stream, extent)
    with open_video(path) as (container, stream):
        return _info(container, stream, extent)


def _info(container: InputContainer, stream: Any, extent: Extent) -> MediaInfo:
    first = next(iter(container.decode(stream)), None)
    if first is None:
        raise MediaError("no frame can be decoded")
    height, width = _upright_size(first, stream)
    return MediaInfo(width=width, height=height, frames=extent.frames, fps=extent.fps, duration=extent.duration)


def _upright_size(frame: Any, stream: Any) -> tuple[int, int]:
    """(height, width) as a player shows it."""
    height, width = frame.height, round(frame.width * (stream.sample_aspect_ratio or 1))
    return (width, height) if frame.rotation % 180 else (height, width)


def check_aspect(height: int, width: int, aspect: float) -> None:
    """Refuse a file whose metadata would have it squeezed.

    Raises:
        MediaError: width over height is more than a few percent from ``aspect``.
    """
    if abs(width / height / aspect - 1) > ASPECT_TOLERANCE:
        raise MediaError(f"it is {width}×{height}, width to height is {aspect:.2f} to 1 by the metadata")


def read_frames(
    path: str | Path,
    times: Sequence[float],
    crop: Crop,
    *,
    aspect: float | None = None,
    hdr: Hdr = "tonemap",
    on_slow: Callable[[], None] | None = None,
) -> NDArray[np.uint8]:
    """The frames shown at the given times, resized and cropped.

    Args:
        path: a video file.
        times: ascending, in seconds from the clip's first frame.
        crop: size to bring the whole (upright) frame to, and the part of it to keep.
        aspect: width over height according to the metadata; None: not compared.
        hdr: what becomes of HDR: shown as SDR, a reason not to use the file, or to stop.
        on_slow: called if the file had to be decoded from its start.

    Returns:
        (3, F, H, W) RGB.

    Raises:
        MediaError: the file can't be opened or decoded, it ends before the last wanted time, it has another aspect, or
            it is HDR and that is a reason.
        DataError: it is HDR, and that is to stop the run.
    """
    from av.error import FFmpegError

    with open_video(path) as (container, stream):
        try:
            frames = nearest(fast_frames(container, stream, times), times, Doubt)
            return _take(frames, stream, len(times), _Scaler(crop, hdr), aspect)
        except (Doubt, FFmpegError):  # the sure way says what is wrong, if anything is
            if on_slow is not None:
                on_slow()
    with open_video(path) as (container, stream):
        fps = measure(container, stream).fps
    with open_video(path) as (container, stream):
        frames = nearest(sure_frames(container, stream, fps), times)
        return _take(frames, stream, len(times), _Scaler(crop, hdr), aspect)


def _take(frames: Iterator[Any], stream: Any, count: int, scale: _Scaler, aspect: float | None) -> NDArray[np.uint8]:
    crop = scale.crop
    out = np.empty((3, count, crop.kept_height, crop.kept_width), dtype=np.uint8)
    previous: Any = None
    for slot, frame in enumerate(frames):
        if previous is None and aspect is not None:
            check_aspect(*_upright_size(frame, stream), aspect)
        if frame is previous:
            # A slow source shows one frame at several times: copying is cheaper than scaling again.
            out[:, slot] = out[:, slot - 1]
        else:
            scale(frame, out[:, slot])
        previous = frame
    return out


def read_still(image: NDArray[np.uint8], crop: Crop) -> NDArray[np.uint8]:
    """An image (H, W, 3), resized and cropped as the frames of a clip are: (3, 1, H, W)."""
    from av.video.frame import VideoFrame

    out = np.empty((3, 1, crop.kept_height, crop.kept_width), dtype=np.uint8)
    _Scaler(crop)(VideoFrame.from_ndarray(image, format="rgb24"), out[:, 0])
    return out


def read_image(path: str | Path) -> NDArray[np.uint8]:
    """An image file as (H, W, 3) RGB: upright, alpha over white, more than 8 bits scaled down.

    Raises:
        MediaError: it can't be read.
    """
    from PIL import Image, ImageOps

    with open_image(path) as file:
        frames = getattr(file, "n_frames", 1)
        if frames > 1 and file.format != "MPO":  # phones keep a preview or a second eye beside a still
            raise MediaError(f"holds {frames} images, of which a still would show one: make a video of them")
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode in ("I;16", "I;16B", "I;16L", "I"):
            grey = np.clip(np.asarray(image, dtype=np.int64) // 257, 0, 255).astype(np.uint8)
            return np.stack([grey] * 3, axis=-1)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(image.convert("RGB"))


def _image_size(path: str | Path) -> tuple[int, int]:
    """(height, width), upright, from the header alone."""
    with open_image(path) as file:
        turned = file.getexif().get(EXIF_ORIENTATION, 1) in EXIF_TURNED
        return (file.width, file.height) if turned else (file.height, file.width)


class _Scaler:
    """Brings frames to RGB and to size, and keeps a part of them; one scaler context for all frames of a clip."""

    def __init__(self, crop: Crop, hdr: Hdr = "tonemap") -> None:
        from av.video.reformatter import Interpolation, VideoReformatter

        self.crop, self.hdr, self._reformatter = crop, hdr, VideoReformatter()
        self._quick = Interpolation.BICUBIC
        self._exact = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
        self._exact |= Interpolation.FULL_CHR_H_INP

    def __call__(self, frame: Any, out: NDArray[np.uint8]) -> None:
        """Write the kept part of a frame into ``out`` (3, H, W)."""
        settle(frame)
        crop, turns = self.crop, round(frame.rotation / 90) % 4
        height, width = (crop.width, crop.height) if turns % 2 else (crop.height, crop.width)
        transfer = transfer_of(frame)
        if transfer is None:
            planes = self._planes(frame, height, width)
        else:
            self._check_allowed(transfer)
            code = self._code(frame, height, width)
            planes = list(np.moveaxis(to_sdr(code[..., :3], transfer), -1, 0))
            if code.shape[-1] == 4:
                planes = [_over_white(plane, (code[..., 3] // 257).astype(np.uint8)) for plane in planes]
        for channel, plane in enumerate(np.rot90(plane, turns) for plane in planes):
            out[channel] = plane[crop.top : crop.top + crop.kept_height, crop.left : crop.left + crop.kept_width]

    def _planes(self, frame: Any, height: int, width: int) -> list[NDArray[np.uint8]]:
        """Red, green and blue, (H, W) each, alpha over white."""
        has_alpha = any(component.is_alpha for component in frame.format.components)
        how = self._exact if is_deep(frame) else self._quick
        # Planar output is the faster one, and it is what the model reads.
        scaled = self._reformatter.reformat(
            frame, width, height, "gbrap" if has_alpha else "gbrp", interpolation=how, threads=1
        )
        buffers = [np.frombuffer(memoryview(plane), np.uint8) for plane in scaled.planes]
        planes = [buffer.reshape(height, -1)[:, :width] for buffer in buffers]
        if has_alpha:
            planes = [_over_white(plane, planes[3]) for plane in planes[:3]]
        green, blue, red = planes
        return [red, green, blue]

    def _code(self, frame: Any, height: int, width: int) -> NDArray[np.uint16]:
        """(H, W, 3) RGB or (H, W, 4) with alpha, as the file encodes it, 16 bits."""
        has_alpha = any(component.is_alpha for component in frame.format.components)
        form = "rgba64le" if has_alpha else "rgb48le"
        scaled = self._reformatter.reformat(frame, width, height, form, interpolation=self._exact, threads=1)
        return scaled.to_ndarray().astype(np.uint16, copy=False)

    def _check_allowed(self, transfer: int) -> None:
        name = "PQ" if transfer == PQ else "HLG"
        if self.hdr == "error":
            raise DataError(f"a clip is HDR ({name}), and hdr: error stops the run; tonemap shows it as SDR")
        if self.hdr == "skip":
            raise MediaError(f"HDR ({name}), which hdr: skip leaves out")


def _over_white(plane: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    opaque = alpha.astype(np.uint16)
    return ((plane * opaque + 255 * (255 - opaque) + 127) // 255).astype(np.uint8)
