"""Clips for the data tests: small, made on the spot, with the frame's number painted into its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mm_trainer.contracts.dataset import DatasetContext
from mm_trainer.contracts.spec import InputSpec

BITS = 8
TIME_BASE = Fraction(1, 12000)


def paint(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """A frame whose columns are the bits of its number, lowest left; the top row of blocks is always white-black."""
    image = np.zeros((height, width, 3), dtype=np.uint8)
    edges = np.linspace(0, width, BITS + 1).astype(int)
    for bit in range(BITS):
        if number >> bit & 1:
            image[:, edges[bit] : edges[bit + 1]] = 255
    return image


def read_number(frame: Tensor) -> int:
    """The number in a frame (3, H, W), uint8 or with values in [−1, 1]."""
    middle = frame.float().mean(0)[frame.shape[1] // 2] - (127.5 if frame.dtype == torch.uint8 else 0)
    edges = np.linspace(0, frame.shape[2], BITS + 1)
    centres = [int((edges[bit] + edges[bit + 1]) / 2) for bit in range(BITS)]
    return sum(1 << bit for bit, centre in enumerate(centres) if middle[centre] > 0)


def read_numbers(video: Tensor) -> list[int]:
    """The numbers of all frames of (3, F, H, W)."""
    return [read_number(video[:, frame]) for frame in range(video.shape[1])]


def write_clip(
    path: Path,
    *,
    frames: int = 20,
    fps: float = 16,
    height: int = 48,
    width: int = 64,
    durations: Sequence[float] | None = None,
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    rotation: int | None = None,
    images: Sequence[NDArray[np.uint8]] | None = None,
    gop: int = 12,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a clip of painted frames.

    Args:
        durations: seconds that each frame is shown; default: 1 / fps each.
        images: pictures to use instead of painted ones.
        rotation: degrees in the display matrix.
        options: of the container.
    """
    import av

    shown = list(durations) if durations is not None else [1 / fps] * (len(images) if images is not None else frames)
    ticks = np.concatenate([[0], np.cumsum(shown)]) / float(TIME_BASE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, pix_fmt
        stream.codec_context.time_base = TIME_BASE
        stream.codec_context.gop_size = gop
        stream.bit_rate = 4_000_000
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(len(shown)):
            image = images[number] if images is not None else paint(number, height, width)
            frame = av.VideoFrame.from_ndarray(image, format="rgba" if image.shape[-1] == 4 else "rgb24")
            frame.pts, frame.time_base = round(ticks[number]), TIME_BASE
            frame.duration = round(ticks[number + 1]) - round(ticks[number])
            for packet in stream.encode(frame):
                packet.duration = packet.duration or frame.duration
                container.mux(packet)
        for packet in stream.encode():
            packet.duration = packet.duration or frame.duration
            container.mux(packet)
    return path


def write_audio(path: Path) -> Path:
    """Half a second of silence, and no picture."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return path


class WordTokenizer:
    """Counts letters: enough for a data test, and picklable."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __call__(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        ids = torch.zeros(len(prompts), self.length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            for column, word in enumerate(prompt.split()[: self.length]):
                ids[row, column], mask[row, column] = len(word), 1
        return {"prompt_ids": ids, "prompt_mask": mask}


def context(
    *, frame_stride: int = 4, spatial_multiple: int = 16, seed: int = 0, tokenizer: WordTokenizer | None = None
) -> DatasetContext:
    """What a run with a small Wan-like model tells its data set."""
    spec = InputSpec(frame_stride=frame_stride, spatial_multiple=spatial_multiple, text_length=8)
    return DatasetContext(input_spec=spec, tokenizer=tokenizer or WordTokenizer(), seed=seed)
