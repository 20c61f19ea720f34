"""Reading frames from video and image files by presentation time.

A clip is read on an even grid of times; at each, the frame nearest in time is taken, so a variable frame rate or odd
timestamps do no harm. Decoding starts at the key frame before the first wanted time, ends with the last wanted one, and
skips the frames in between that are neither wanted nor needed to decode others.
Files are opened inside the call and closed before it returns: no decoder outlives a sample or crosses a fork.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_trainer.data.metadata.formats import IMAGE_SUFFIXES
from mm_trainer.data.video.buckets import Crop

if TYPE_CHECKING:
    from av.container import InputContainer
    from PIL.ImageFile import ImageFile

EXIF_ORIENTATION, EXIF_TURNED = 0x0112, (5, 6, 7, 8)
RATE_TOLERANCE = 0.05
"""Fraction of a frame that a duration may fall short by: containers round times to a millisecond or so."""


ASPECT_TOLERANCE = 0.05
"""Relative: sizes rounded to multiples of 16 differ by a few percent, which nobody sees."""


class MediaError(Exception):
    """A file that can't be used; the message is the reason, without the path."""


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


class _Shown(NamedTuple):
    """A decoded frame, and when it is shown, in seconds from the clip's start."""

    time: float
    end: float
    """With the tolerance of `RATE_TOLERANCE`; equal to ``time`` where the file states no duration."""
    frame: Any


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
    with _open_video(path) as (container, stream):
        duration, frames = _extent(container, stream)
        first = next(iter(container.decode(stream)), None)
        if first is None:
            raise MediaError("no frame can be decoded")
        height, width = _upright_size(first, stream)
        rate = float(stream.average_rate or 0) or (frames / duration if duration else 1.0)
        return MediaInfo(width=width, height=height, frames=frames, fps=rate, duration=duration)


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
    path: str | Path, times: Sequence[float], crop: Crop, *, aspect: float | None = None
) -> NDArray[np.uint8]:
    """The frames shown at the given times, resized and cropped.

    Args:
        path: a video file.
        times: ascending, in seconds from the clip's first frame.
        crop: size to bring the whole (upright) frame to, and the part of it to keep.
        aspect: width over height according to the metadata; None: not compared.

    Returns:
        (3, F, H, W) RGB.

    Raises:
        MediaError: the file can't be opened or decoded, it ends before the last wanted time, or it has another aspect.
    """
    scale = _Scaler(crop)
    out = np.empty((3, len(times), crop.kept_height, crop.kept_width), dtype=np.uint8)
    with _open_video(path) as (container, stream):
        previous: Any = None
        for slot, frame in enumerate(_nearest(_decode_needed(container, stream, times), times)):
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

    with _open_image(path) as file:
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
    with _open_image(path) as file:
        turned = file.getexif().get(EXIF_ORIENTATION, 1) in EXIF_TURNED
        return (file.width, file.height) if turned else (file.height, file.width)


@contextmanager
def _open_image(path: str | Path) -> Iterator[ImageFile]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            yield file
    except FileNotFoundError:
        raise _missing(path) from None
    except UnidentifiedImageError:
        raise MediaError("can't read the image: unknown format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
        raise MediaError(f"can't read the image: {error}") from error


@contextmanager
def _open_video(path: str | Path) -> Iterator[tuple[InputContainer, Any]]:
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path), metadata_errors="replace") as container:
            stream = _video_stream(container)
            stream.codec_context.thread_count = 1  # parallelism comes from the workers
            yield container, stream
    except FileNotFoundError:
        raise _missing(path) from None
    except FFmpegError as error:
        raise MediaError(f"can't be read: {error.strerror}") from error


def _missing(path: str | Path) -> MediaError:
    return MediaError("remote locations can't be read" if ":/" in str(path) else "no such file")


def _video_stream(container: InputContainer) -> Any:
    from av.stream import Disposition

    # Cover art is a video stream to FFmpeg as well.
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise MediaError("no video stream")
    stream = streams[0]
    if stream.codec_context is None:
        raise MediaError("can't decode: no decoder for its codec")
    return stream


def _extent(container: InputContainer, stream: Any) -> tuple[float, int]:
    """Duration in seconds and number of frames; from the header, else from the packets (nothing is decoded)."""
    if stream.duration and stream.frames:
        return float(stream.duration * stream.time_base), stream.frames
    # The header may lack them (streamed or cut files); packets are cheap to read, since nothing is decoded.
    packets = [(packet.pts, packet.duration or 0) for packet in container.demux(stream) if packet.pts is not None]
    if not packets:
        raise MediaError("no packet with a timestamp")
    container.seek(0)
    (first, _), (last, length) = min(packets), max(packets)
    if not length:  # some containers don't state how long the last frame is shown
        length = (last - first) // max(1, len(packets) - 1)
    return float((last + length - first) * stream.time_base), len(packets)


def _decode_needed(container: InputContainer, stream: Any, times: Sequence[float]) -> Iterator[_Shown]:
    """Frames in the order of their times, from the key frame before the first of ``times`` on.

    Frames that are nearest to none of the times are decoded only if others refer to them.
    """
    start = stream.start_time or 0
    if times[0] > 0:
        container.seek(int(start + times[0] / stream.time_base), stream=stream)
        frames = _decode_on(container, stream, times)
        first = next(frames, None)
        if first is not None and first.time <= times[0]:
            yield first
            yield from frames
            return
        container.seek(start, stream=stream)  # the container's index led too far: read from the start
    yield from _decode_on(container, stream, times)


def _decode_on(container: InputContainer, stream: Any, times: Sequence[float]) -> Iterator[_Shown]:
    """As `_decode_needed`, from where the container stands."""
    start, unit, context = stream.start_time or 0, float(stream.time_base), stream.codec_context
    wanted = [start + time / unit for time in times]
    packets = _packets_until(container, stream, wanted[-1])
    needed = _nearest_stamps(sorted(packet.pts for packet in packets if packet.pts is not None), wanted)
    for packet in [*packets, None]:  # None: what the decoder holds back
        if packet is not None:
            context.skip_frame = "DEFAULT" if packet.pts is None or packet.pts in needed else "NONREF"
        for frame in context.decode(packet):
            if frame.pts is None:
                raise MediaError("a frame has no timestamp")
            time = (frame.pts - start) * unit  # frames that the decoder held back don't know the unit themselves
            yield _Shown(time, time + (1 + RATE_TOLERANCE) * (frame.duration or 0) * unit, frame)


def _packets_until(container: InputContainer, stream: Any, last: float) -> list[Any]:
    """Packets from here up to all that are shown by the timestamp ``last``, and the one shown next."""
    packets, following = [], math.inf
    for packet in container.demux(stream):
        if not packet.size:
            continue
        packets.append(packet)
        if packet.pts is not None and packet.pts >= last:
            following = min(following, packet.pts)
        if packet.dts is not None and packet.dts >= following:  # nothing is shown before it is decoded
            break
    return packets


def _nearest_stamps(stamps: Sequence[int], wanted: Sequence[float]) -> set[int]:
    """Those of ascending timestamps that are nearest to a wanted one (both of two equally near), and the last."""
    if not stamps:
        return set()
    grid, at = np.array(stamps), np.array(wanted)
    after = np.searchsorted(grid, at).clip(min(1, len(grid) - 1), len(grid) - 1)
    left, right = grid[after - 1], grid[after]
    closer = np.abs(at - left) - np.abs(right - at)
    rounding = 0.01
    return {*left[closer <= rounding].tolist(), *right[closer >= -rounding].tolist(), stamps[-1]}


def _nearest(frames: Iterator[_Shown], times: Sequence[float]) -> Iterator[Any]:
    """For each time the frame nearest to it; of two that are equally near, the earlier."""
    before = after = next(frames, None)
    if before is None or after is None:
        raise MediaError("no frame can be decoded")
    ended = False
    for time in times:
        while not ended and after.time < time:
            following = next(frames, None)
            if following is None:
                ended = True
            else:
                before, after = after, following
        if ended and time > after.end:
            raise MediaError(f"cut off: its frames end at {after.end:.2f} s, {time:.2f} s is needed")
        chosen = before if abs(time - before.time) <= abs(after.time - time) else after
        if chosen.frame.is_corrupt:
            raise MediaError(f"the frame at {chosen.time:.2f} s is damaged")
        yield chosen.frame


class _Scaler:
    """Brings frames to RGB and to size, and keeps a part of them; one scaler context for all frames of a clip."""

    def __init__(self, crop: Crop) -> None:
        from av.video.reformatter import VideoReformatter

        self.crop, self._reformatter = crop, VideoReformatter()

    def __call__(self, frame: Any, out: NDArray[np.uint8]) -> None:
        """Write the kept part of a frame into ``out`` (3, H, W)."""
        crop, turns = self.crop, round(frame.rotation / 90) % 4
        height, width = (crop.width, crop.height) if turns % 2 else (crop.height, crop.width)
        has_alpha = any(component.is_alpha for component in frame.format.components)
        # Planar output is the faster one, and it is what the model reads.
        scaled = self._reformatter.reformat(
            frame, width, height, "gbrap" if has_alpha else "gbrp", interpolation="BICUBIC", threads=1
        )
        buffers = [np.frombuffer(memoryview(plane), np.uint8) for plane in scaled.planes]
        planes = [buffer.reshape(height, -1)[:, :width] for buffer in buffers]
        if has_alpha:
            planes = [_over_white(plane, planes[3]) for plane in planes[:3]]
        green, blue, red = (np.rot90(plane, turns) for plane in planes)
        for channel, plane in enumerate((red, green, blue)):
            out[channel] = plane[crop.top : crop.top + crop.kept_height, crop.left : crop.left + crop.kept_width]


def _over_white(plane: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    opaque = alpha.astype(np.uint16)
    return ((plane * opaque + 255 * (255 - opaque) + 127) // 255).astype(np.uint8)
