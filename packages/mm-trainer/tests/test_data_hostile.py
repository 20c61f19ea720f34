"""Media that reach elsewhere, hang, start programs or ask for gigabytes: refused, each with a reason, at once."""

from __future__ import annotations

import ast
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_clips import write_clip
from PIL import Image

from mm_trainer.data.video import safe_open
from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.reader import probe, read_frames, read_image
from mm_trainer.data.video.safe_open import MediaError

SOURCE = Path(safe_open.__file__).parents[2]
CROP = Crop(48, 64, 0, 0, 48, 64)


def playlist(folder: Path, target: str, *, ended: bool = True) -> str:
    end = "#EXT-X-ENDLIST\n" if ended else ""
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.25,\n{target}\n{end}"


def scripts(folder: Path) -> dict[str, str]:
    outside = folder.parent / "outside.ts"
    return {
        "playlist": playlist(folder, str(outside)),
        "endless playlist": playlist(folder, str(outside), ended=False),
        "playlist of a host": playlist(folder, "http://127.0.0.1:9/a.ts"),
        "concat script": f"ffconcat version 1.0\nfile '{outside}'\n",
        "concat script of itself": f"ffconcat version 1.0\nfile '{folder / 'hostile.mp4'}'\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "text": "Once upon a time there was a text file that some demuxers take for a video.\n" * 40,
        "svg": '<svg xmlns="http://www.w3.org/2000/svg" width="64" height="48"><rect width="9" height="9"/></svg>',
    }


@pytest.mark.parametrize("kind", scripts(Path("x")))
@pytest.mark.parametrize("suffix", [".mp4", ".ts", ".m3u8"])
def test_what_names_other_media_is_no_video(tmp_path: Path, kind: str, suffix: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_clip(tmp_path / "outside.ts", frames=20, codec="libx264")
    hostile = folder / f"hostile{suffix}"
    hostile.write_text(scripts(folder)[kind].replace("hostile.mp4", hostile.name), encoding="utf-8")
    for read in (probe, lambda path: read_frames(path, [0.0], CROP)):
        with pytest.raises(MediaError, match="can't be read: (not a video format that is read here|Invalid data)"):
            read(hostile)


def test_the_lists_are_what_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg ignores an option that it doesn't know: with the playlist's demuxer on the list, the playlist opens."""
    write_clip(tmp_path / "outside.ts", frames=20, codec="libx264")
    hostile = tmp_path / "hostile.m3u8"
    hostile.write_text(playlist(tmp_path, str(tmp_path / "outside.ts")), encoding="utf-8")
    with pytest.raises(MediaError, match="not a video format"):
        probe(hostile)
    monkeypatch.setattr(safe_open, "DEMUXERS", (*safe_open.DEMUXERS, "hls"))
    assert probe(hostile).frames > 0


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:9/a.mp4", "concat:a.mp4|b.mp4", "pipe:0", "data:video/mp4;base64,AAAA"]
)
def test_a_name_is_a_file_and_nothing_else(name: str) -> None:
    with pytest.raises(MediaError, match="no such file|remote locations"):
        probe(name)


def test_a_name_with_a_colon_is_read(tmp_path: Path) -> None:
    assert probe(write_clip(tmp_path / "scene: 1.mp4", frames=5)).frames == 5


@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_pipes_folders_and_devices_are_no_files(tmp_path: Path, suffix: str) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    pipe, folder = tmp_path / f"pipe{suffix}", tmp_path / f"folder{suffix}"
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for path in (pipe, folder, tmp_path / f"zero{suffix}"):
        with pytest.raises(MediaError, match="not a regular file"):
            probe(path) if suffix == ".mp4" else read_image(path)


def test_no_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript under another name would start Ghostscript."""
    import subprocess

    def refuse(*command: Any, **settings: Any) -> None:
        raise AssertionError(f"started {command}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(MediaError, match="unknown format"):
        read_image(tmp_path / "a.png")


def png_of(width: int, height: int) -> bytes:
    """A black picture, compressed well: a few kilobytes for gigabytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" * (1 + width * 3)) for _ in range(min(height, 2000))) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif_of(width: int, height: int) -> bytes:
    """A canvas of any size around one pixel."""
    size = struct.pack("<HH", width, height)
    image = b"\x2c" + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x4c\x01\0"
    return b"GIF89a" + size + b"\x80\0\0" + b"\0\0\0\xff\xff\xff" + image * 20 + b"\x3b"


def growth(work: Callable[[], object]) -> float:
    """GiB by which the peak of this process rises."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def test_bombs_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png_of(9_000, 9_000))
    (tmp_path / "bomb.png").write_bytes(png_of(30_000, 30_000))
    (tmp_path / "bomb.gif").write_bytes(gif_of(60_000, 60_000))

    def look() -> None:
        with pytest.raises(MediaError, match="9000×9000 are more than 67,108,864 pixels"):
            read_image(tmp_path / "large.png")
        with pytest.raises(MediaError, match="decompression bomb"):  # Pillow's own limit comes first
            read_image(tmp_path / "bomb.png")
        for read in (probe, lambda path: read_frames(path, [0.0], CROP)):
            with pytest.raises(MediaError, match="60000×60000 are more than|can't be read"):
                read(tmp_path / "bomb.gif")

    assert growth(look) < 0.2


def test_frames_larger_than_the_header_says_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the decoder's too: a header may state a small size."""
    path = write_clip(tmp_path / "a.mp4", frames=5, codec="libx264")
    monkeypatch.setattr(safe_open, "check_pixels", lambda width, height: None)
    monkeypatch.setattr(safe_open, "MOST_PIXELS", 48 * 64 - 1)
    with pytest.raises(MediaError, match="can't be read"):
        read_frames(path, [0.0], CROP)


def test_a_read_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "a.mp4", frames=40)
    monkeypatch.setattr(safe_open, "LONGEST_READ_S", -1.0)
    with pytest.raises(MediaError, match="given up after"):
        read_frames(path, [0.0, 1.0], CROP)


def test_nothing_else_opens_media() -> None:
    """Every opener stands in `safe_open`, but for those that write and for a file that the user names himself."""
    openers = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("av.open", "Image.open", "VideoReader"):
                openers.add((file.relative_to(SOURCE).as_posix(), ast.unparse(node.func)))
    assert openers == {
        ("data/video/safe_open.py", "av.open"),
        ("data/video/safe_open.py", "Image.open"),
        ("commands/sample.py", "av.open"),
    }
