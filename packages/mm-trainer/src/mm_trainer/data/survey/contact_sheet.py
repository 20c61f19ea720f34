"""A picture of what the model will see: some frames of some samples, with their captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mm_trainer.data.survey.scan import SHEET_FRAMES, Glimpse

if TYPE_CHECKING:
    from PIL import Image

THUMBNAIL = 160
"""Longer side of a frame on the sheet, in pixels."""
GAP, LINE, LINES, COLUMNS = 8, 14, 3, 2


def write_contact_sheet(glimpses: Sequence[Glimpse], path: Path, *, samples: int) -> None:
    """Write a PNG with a cell per sample, two in a row: frames from left to right, file and caption below. A line on
    top says how many of all samples it shows.

    Args:
        glimpses: of `scan`; those without frames are left out.
        path: the PNG.
        samples: of the data set, shown or not.
    """
    from PIL import Image, ImageDraw

    cells = [glimpse for glimpse in glimpses if glimpse.frames is not None]
    cell_width = SHEET_FRAMES * (THUMBNAIL + 2) + GAP
    cell_height = THUMBNAIL + LINES * LINE + 2 * GAP
    rows = max(1, -(-len(cells) // COLUMNS))
    sheet = Image.new("RGB", (COLUMNS * cell_width + GAP, LINE + rows * cell_height + GAP), "lightgrey")
    draw = ImageDraw.Draw(sheet)
    which = f"all {samples:,} samples" if len(cells) == samples else f"{len(cells):,} of {samples:,} samples"
    draw.text((GAP, 2), which, fill="black")
    for place, glimpse in enumerate(cells):
        left = GAP + place % COLUMNS * cell_width
        top = GAP + LINE + place // COLUMNS * cell_height
        frames = _frames(glimpse)
        for number, frame in enumerate(frames):
            sheet.paste(frame, (left + number * (THUMBNAIL + 2), top))
        assert glimpse.frames is not None
        height, width = glimpse.frames.shape[1:3]
        text = f"{glimpse.index}  {glimpse.name}  {width}x{height}  {glimpse.caption or '(empty caption)'}"
        lines = textwrap.wrap(text, width=cell_width // 7, max_lines=LINES, placeholder=" …")
        draw.multiline_text((left, top + frames[0].height + 2), "\n".join(lines), fill="black", spacing=2)
    sheet.save(path)


def _frames(glimpse: Glimpse) -> list[Image.Image]:
    from PIL import Image, ImageOps

    assert glimpse.frames is not None
    images = (Image.fromarray(np.ascontiguousarray(frame)) for frame in glimpse.frames)
    return [ImageOps.contain(image, (THUMBNAIL, THUMBNAIL)) for image in images]
