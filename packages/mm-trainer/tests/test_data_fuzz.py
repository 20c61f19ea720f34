"""Damaged files of every kind: read, or refused with a reason; never a traceback, never gigabytes."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from data_clips import paint, write_clip
from PIL import Image

from mm_trainer.data.metadata.formats import read_table
from mm_trainer.data.video.buckets import Crop
from mm_trainer.data.video.reader import probe, read_frames, read_image
from mm_trainer.data.video.safe_open import MediaError
from mm_trainer.errors import DataError

ROWS = [{"video": f"{number}.mp4", "prompt": f"caption, number {number}", "width": 64} for number in range(20)]
CROP = Crop(48, 64, 0, 0, 48, 64)


def read_clip(path: Path) -> None:
    info = probe(path)
    if info.frames < 10_000:
        read_frames(path, [0.0, min(info.duration / 2, 3.0)], CROP)


def make_csv(path: Path) -> None:
    lines = ["video,prompt,width", *(f'{row["video"]},"{row["prompt"]}",{row["width"]}' for row in ROWS)]
    path.write_text("\n".join(lines), encoding="utf-8")


def make_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(ROWS), path)


def make_folder(path: Path) -> None:
    """The caption file of a clip; the folder around it is what is read."""
    path.with_suffix(".mp4").touch()
    path.write_text("a caption of some words — and signs", encoding="utf-8")


Kind = tuple[Callable[[Path], object], Callable[[Path], object]]
KINDS: dict[str, Kind] = {
    "csv": (make_csv, read_table),
    "json": (lambda path: path.write_text(json.dumps(ROWS), encoding="utf-8"), read_table),
    "jsonl": (lambda path: path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8"), read_table),
    "parquet": (make_parquet, read_table),
    "txt": (make_folder, lambda path: read_table(path.parent)),
    "png": (lambda path: Image.fromarray(paint(5, 48, 64)).save(path), read_image),
    "jpg": (lambda path: Image.fromarray(paint(5, 48, 64)).save(path), read_image),
    "webp": (lambda path: Image.fromarray(paint(5, 48, 64)).save(path), read_image),
    "tif": (lambda path: Image.fromarray(paint(5, 48, 64)).save(path), read_image),
    "mp4": (lambda path: write_clip(path, codec="libx264"), read_clip),
    "mkv": (lambda path: write_clip(path, codec="libx264"), read_clip),
    "avi": (lambda path: write_clip(path), read_clip),
    "ts": (lambda path: write_clip(path, codec="libx264"), read_clip),
    "gif": (lambda path: write_clip(path, codec="gif", pix_fmt="rgb8"), read_clip),
}


def damage(data: bytes, dice: random.Random) -> bytes:
    """Some bytes changed, a piece lost, repeated or filled with zeros."""
    out = bytearray(data)
    for _ in range(dice.randint(1, 8)):
        at, length = dice.randrange(len(out)), dice.randint(1, 64)
        change = dice.choice(("byte", "cut", "repeat", "zeros", "end"))
        if change == "byte":
            out[at] = dice.randrange(256)
        elif change == "cut":
            del out[at : at + length]
        elif change == "repeat":
            out[at:at] = out[at : at + length]
        elif change == "zeros":
            out[at : at + length] = bytes(length)
        elif at > len(out) // 2:
            del out[at:]
        if not out:
            return b"\0"
    return bytes(out)


@pytest.mark.filterwarnings("ignore")  # of Pillow, about what it goes on with
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    make, read = KINDS[kind]
    path = tmp_path / f"file.{kind}"
    make(path)
    whole, refused = path.read_bytes(), 0
    read(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        path.write_bytes(damage(whole, random.Random(seed)))
        try:
            read(path)
        except (DataError, MediaError) as error:
            refused += 1
            assert str(error)
    assert refused, "the damage does something"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"
