"""From a video file to frames and the times that they are shown at.

[Note: what a file states] Containers state times, rates and counts, and many of them wrongly: AVI and ASF have the
order of decoding where the order of showing is meant, program streams have times for a few frames only, a track header
may state any duration, and rates are rounded. One fact always holds: frames leave a decoder in the order in which they
are shown. So there are two ways.

- *Fast*, for containers whose packets carry the times of their frames: seek to the key frame before the first wanted
  time, decode to the last one, and leave out what is neither wanted nor needed by others, where the decoder can. It
  checks itself: times must rise, and every frame that is nearest to a wanted time must have come out.
- *Sure*, for all others and where the fast way fails: decode from the start. Times that rise from frame to frame are
  believed; where they don't, or are missing, the n-th frame is shown at n measured periods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mm_trainer.data.video.safe_open import Deadline, MediaError

if TYPE_CHECKING:
    from av.container import InputContainer

RATE_TOLERANCE = 0.05
"""Fraction of a frame that a duration may fall short by: containers round times to a millisecond or so."""
STATED_RATE_TOLERANCE = 0.01
"""Relative: a stated rate this near to the measured one is the exact one."""
STRAY_FRAMES = 1.5
"""Frames by which the span of times may be off where packets carry the times of decoding."""
TIMED = ("mov", "matroska", "mpegts", "flv", "nut", "gif", "ogg", "apng")
"""Demuxers whose packets carry the times of their frames."""
INDEXED = ("mov", "avi")
"""Demuxers that know all packets once the file is open."""
SKIPPING = ("h264", "hevc", "mpeg2video", "mpeg4")
"""Decoders that take up ``skip_frame`` from packet to packet; others read it once, or leave out what is wanted."""
MOST_REORDERED = 17
"""Frames after which none can be shown that was decoded before: the largest picture buffer, and one."""


class Doubt(MediaError):
    """The fast way isn't sure of its frames."""


class Shown(NamedTuple):
    """A decoded frame, and when it is shown, in seconds from the clip's start."""

    time: float
    end: float
    """With the tolerance of `RATE_TOLERANCE`; equal to ``time`` where nothing states a duration."""
    frame: Any


@dataclass(frozen=True)
class Extent:
    """How much there is to see in a file, measured.

    Args:
        frames: that are shown.
        duration: seconds from the first frame's start to the last frame's end.
        fps: average rate.
    """

    frames: int
    duration: float
    fps: float


def _demuxer(container: InputContainer) -> str:
    return container.format.name.partition(",")[0]


def has_index(container: InputContainer, stream: Any) -> bool:
    """Whether all packets are known without reading them."""
    return _demuxer(container) in INDEXED and len(stream.index_entries) > 0


def measure(container: InputContainer, stream: Any) -> Extent:
    """Count what is shown: by the index where the file has a whole one, else by its packets; nothing is decoded.

    Without an index (`has_index`) the container stands at its end afterwards.
    """
    if has_index(container, stream):
        entries = [stream.index_entries[i] for i in range(len(stream.index_entries))]
        stamps = [entry.timestamp for entry in entries if not entry.is_discard]
        count, lengths = len(stamps), [0]
    else:
        packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
        stamps = [packet.pts for packet in packets if packet.pts is not None]
        count, lengths = len(packets), [packet.duration or 0 for packet in packets]
    if not count:
        raise MediaError("no frame can be decoded")
    unit, stated = float(stream.time_base), [float(rate) for rate in _stated_rates(stream)]
    # Times that only some frames have say nothing of the others.
    span = (max(stamps) - min(stamps)) * unit if len(set(stamps)) == count > 1 else 0.0
    if not span:
        length = 1 / stated[0] if stated else max(lengths) * unit
        return Extent(count, count * length, 1 / length if length else 1.0)
    steps = count - 1
    allowed = max(STATED_RATE_TOLERANCE * steps, 0 if _demuxer(container) in TIMED else STRAY_FRAMES)
    exact = min(stated, key=lambda rate: abs(span * rate - steps), default=0.0)
    fps = exact if abs(span * exact - steps) <= allowed else steps / span
    return Extent(count, count / fps, fps)


def _stated_rates(stream: Any) -> list[Fraction]:
    """What the file says, the most reliable first; the last may count fields."""
    return [rate for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate) if rate]


def fast_frames(container: InputContainer, stream: Any, times: Sequence[float]) -> Iterator[Shown]:
    """Frames in the order of their times, from the key frame before the first of ``times`` on; at least those nearest
    to the times.

    Raises:
        Doubt: the container doesn't carry the times of its frames, or what comes out isn't what it states.
    """
    if _demuxer(container) not in TIMED:
        raise Doubt("its container doesn't carry the times of its frames")
    unit, context = float(stream.time_base), stream.codec_context
    packets = list(islice(_packets(container, stream), MOST_REORDERED))
    origin = min(_stamps(packets), default=0)
    wanted = [origin + time / unit for time in times]
    if times[0] > 0:
        container.seek(int(wanted[0]), stream=stream)
        packets = []
    packets += _packets_until(container, stream, wanted[-1], packets)
    needed = _nearest_stamps(sorted(_stamps(packets)), wanted)
    skips, due, last = context.codec.name in SKIPPING, sorted(needed), -math.inf
    deadline = Deadline()
    for packet in [*packets, None]:  # None: what the decoder holds back
        deadline.check()
        if skips and packet is not None:
            context.skip_frame = "DEFAULT" if packet.pts in needed else "NONREF"
        for frame in context.decode(packet):
            if frame.pts is None or frame.pts <= last:
                raise Doubt("its frames don't come in the order of their times")
            if last == -math.inf and not frame.key_frame:
                raise Doubt("decoding didn't start at a key frame")
            last = frame.pts
            if due and due[0] < last:
                raise Doubt("a frame is missing")
            if due and due[0] == last:
                due.pop(0)
            time = (last - origin) * unit  # frames that the decoder held back don't know the unit themselves
            yield Shown(time, time + (1 + RATE_TOLERANCE) * (frame.duration or 0) * unit, frame)


def _packets(container: InputContainer, stream: Any) -> Iterator[Any]:
    return (packet for packet in container.demux(stream) if packet.size)


def _stamps(packets: Sequence[Any]) -> list[int]:
    """Times of what is shown of some packets.

    Raises:
        Doubt: a packet has none, or two have the same.
    """
    stamps = [packet.pts for packet in packets if not packet.is_discard]
    if None in stamps or len(set(stamps)) < len(stamps):
        raise Doubt("not every packet has a time of its own")
    return stamps


def _packets_until(container: InputContainer, stream: Any, last: float, before: Sequence[Any]) -> list[Any]:
    """Packets from here up to all that are shown by the timestamp ``last``, and the one shown next.

    Args:
        before: those that were read just before.
    """
    packets: list[Any] = []
    following = min((p.pts for p in before if p.pts is not None and p.pts >= last), default=math.inf)
    if before and before[-1].dts is not None and before[-1].dts >= following:
        return packets
    for packet in _packets(container, stream):
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


def sure_frames(container: InputContainer, stream: Any, fps: float) -> Iterator[Shown]:
    """All frames in the order of decoding.

    Args:
        fps: measured rate, for frames whose times are missing or don't rise.

    Raises:
        MediaError: times that rose at first jump back.
    """
    frames = _in_time(container.decode(stream))
    head = list(islice(frames, MOST_REORDERED))
    stamps = [frame.pts for frame in head]
    if None in stamps or any(later <= earlier for earlier, later in pairwise(stamps)):
        for number, frame in enumerate(chain(head, frames)):
            yield Shown(number / fps, (number + 1 + RATE_TOLERANCE) / fps, frame)
        return
    unit, last = float(stream.time_base), -math.inf
    for frame in chain(head, frames):
        if frame.pts is None or frame.pts <= last:
            raise MediaError(f"its times jump back after {(last - stamps[0]) * unit:.2f} s")
        last = frame.pts
        time = (last - stamps[0]) * unit
        yield Shown(time, time + (1 + RATE_TOLERANCE) * ((frame.duration or 0) * unit or 1 / fps), frame)


def _in_time(frames: Iterator[Any]) -> Iterator[Any]:
    deadline = Deadline()
    for frame in frames:
        deadline.check()
        yield frame


def nearest(frames: Iterator[Shown], times: Sequence[float], fault: type[MediaError] = MediaError) -> Iterator[Any]:
    """For each of ascending times the frame nearest to it; of two that are equally near, the earlier.

    Raises:
        MediaError: the frames end before the last time, or one of those wanted is damaged; as ``fault``.
    """
    before = after = next(frames, None)
    if before is None or after is None:
        raise fault("no frame can be decoded")
    ended = False
    for time in times:
        while not ended and after.time < time:
            following = next(frames, None)
            if following is None:
                ended = True
            else:
                before, after = after, following
        if ended and time > after.end:
            raise fault(f"cut off: its frames end at {after.end:.2f} s, {time:.2f} s is needed")
        chosen = before if abs(time - before.time) <= abs(after.time - time) else after
        if chosen.frame.is_corrupt:
            raise fault(f"the frame at {chosen.time:.2f} s is damaged")
        yield chosen.frame
