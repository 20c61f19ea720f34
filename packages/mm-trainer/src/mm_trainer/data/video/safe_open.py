"""Opening media that somebody else made: which kinds are read at all, and how much of them.

FFmpeg and Pillow follow what a file says: a playlist opens other files and hosts, a script lists itself, a picture in
PostScript starts a program, a header of a few bytes asks for gigabytes. So only regular files are opened, formats and
protocols come from lists, and sizes are limited before anything is allocated. FFmpeg ignores options that it doesn't
know without a word; the tests prove that each of these refuses something.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from av.container import InputContainer
    from PIL.ImageFile import ImageFile

DEMUXERS = (
    *("mov", "matroska", "avi", "mpegts", "flv", "asf", "mpeg", "gif", "apng", "ogg", "nut", "ivf", "mxf", "rm", "dv"),
    *("mpegvideo", "h264", "hevc", "m4v", "obu", "mjpeg", "yuv4mpegpipe"),
)
"""FFmpeg's names of containers that hold their video themselves; one name of a family lets all of it in."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Pillow's names of formats that it decodes without starting a program."""
MOST_PIXELS = 2**26
"""Of one frame or image: 8192 × 8192."""
LONGEST_READ_S = 120.0
"""Seconds of decoding after which a sample is given up."""


class MediaError(Exception):
    """A file that can't be used; the message is the reason, without the path."""


@contextmanager
def open_video(path: str | Path) -> Iterator[tuple[InputContainer, Any]]:
    """The container and its video stream.

    Raises:
        MediaError: it isn't there, or there is nothing in it that could be decoded; also for what goes wrong inside.
    """
    import av
    from av.error import ArgumentError, FFmpegError

    check_regular(path)
    try:
        # The prefix keeps a name with a colon in it from being read as another protocol.
        container = av.open(
            f"file:{os.fspath(path)}",
            metadata_errors="replace",
            options={"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "file"},
        )
    except ArgumentError:
        raise MediaError("can't be read: not a video format that is read here") from None
    except FFmpegError as error:
        raise MediaError(f"can't be read: {error.strerror}") from error
    try:
        with container:
            stream = _video_stream(container)
            context = stream.codec_context
            check_pixels(context.width, context.height)
            context.options = {"max_pixels": str(MOST_PIXELS)}  # what the frames say, whatever the header said
            context.thread_count = 1  # parallelism comes from the workers
            yield container, stream
    except FFmpegError as error:
        raise MediaError(f"can't be read: {error.strerror}") from error


@contextmanager
def open_image(path: str | Path) -> Iterator[ImageFile]:
    """An image whose pixels haven't been decoded yet.

    Raises:
        MediaError: it isn't there, of no format that is read, or too large; also for what goes wrong inside.
    """
    from PIL import Image, UnidentifiedImageError

    check_regular(path)
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as file:
            check_pixels(file.width, file.height)
            yield file
    except UnidentifiedImageError:
        raise MediaError("can't read the image: unknown format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
        raise MediaError(f"can't read the image: {error}") from error


def check_regular(path: str | Path) -> None:
    """Refuse what isn't a file: opening a pipe would wait for ever.

    Raises:
        MediaError: it is something else, or nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        raise MediaError("remote locations can't be read" if ":/" in str(path) else "no such file") from None
    if not stat.S_ISREG(mode):
        raise MediaError("not a regular file")


def check_pixels(width: int, height: int) -> None:
    """Refuse a size that would take gigabytes.

    Raises:
        MediaError: with the numbers.
    """
    if width * height > MOST_PIXELS:
        raise MediaError(f"{width}×{height} are more than {MOST_PIXELS:,} pixels")


class Deadline:
    """Ends a read that takes too long; asked between packets, since no decoder takes long for one."""

    def __init__(self) -> None:
        self._end = time.monotonic() + LONGEST_READ_S

    def check(self) -> None:
        """Raise `MediaError` once the time is up."""
        if time.monotonic() > self._end:
            raise MediaError(f"given up after {LONGEST_READ_S:g} s")


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
