"""Buckets: which one a clip gets, and how it is brought there."""

from __future__ import annotations

import math

import pytest

from mm_trainer.contracts.spec import InputSpec
from mm_trainer.data.video.buckets import (
    Bucket,
    BudgetBuckets,
    FixedBuckets,
    check_bucket,
    cover,
    floor_frames,
    parse_buckets,
)
from mm_trainer.errors import DataError

SPEC = InputSpec(frame_stride=4, spatial_multiple=16)


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (Bucket(80, 48, 64), r"80 frames don't fit the model, which takes 4·k \+ 1: nearest 77 or 81"),
        (Bucket(2, 48, 64), "nearest 1 or 5"),
        (Bucket(81, 60, 100), "height 60 .* multiples of 16: nearest 48 or 64"),
        (Bucket(81, 64, 8), "width 8 .* nearest 16"),
    ],
)
def test_sizes_off_the_models_rule_are_refused(bucket: Bucket, message: str) -> None:
    """B061, B070"""
    with pytest.raises(DataError, match=message):
        check_bucket(bucket, SPEC)


def test_the_stride_is_the_models() -> None:
    assert check_bucket(Bucket(9, 32, 32), InputSpec(frame_stride=8, spatial_multiple=32)) == (9, 32, 32)
    assert [floor_frames(frames, SPEC) for frames in (1, 4, 5, 50, 81)] == [1, 1, 5, 49, 81]


def test_longest_then_nearest_aspect_then_largest_that_does_not_enlarge() -> None:
    buckets = FixedBuckets(
        parse_buckets([(81, 480, 832), (81, 832, 480), (81, 240, 416), (17, 480, 832), (33, 480, 480)], None)
    )
    assert buckets.choose(frames=100, height=1080, width=1920) == (81, 480, 832)
    assert buckets.choose(frames=81, height=1920, width=1080) == (81, 832, 480)
    assert buckets.choose(frames=81, height=270, width=480) == (81, 240, 416)
    assert buckets.choose(frames=80, height=1080, width=1920) == (33, 480, 480)
    assert buckets.choose(frames=32, height=1080, width=1920) == (17, 480, 832)
    assert buckets.choose(frames=16, height=1080, width=1920) is None


@pytest.mark.parametrize("source", [(1080, 1920), (1920, 1080), (720, 720), (800, 1000), (500, 2000), (288, 352)])
def test_budget_buckets_keep_the_aspect_within_the_budget(source: tuple[int, int]) -> None:
    buckets = BudgetBuckets(frames=81, max_pixels=480 * 832, aspect_tolerance=0.1, multiple=16)
    bucket = buckets.choose(frames=81, height=source[0], width=source[1])
    assert bucket is not None
    assert bucket.height * bucket.width <= 480 * 832
    assert bucket.height % 16 == bucket.width % 16 == 0
    assert bucket.height * bucket.width <= source[0] * source[1]
    crop = cover(bucket, height=source[0], width=source[1])
    cut = 1 - bucket.height * bucket.width / (crop.height * crop.width)
    assert cut < 0.1 + 16 / min(bucket.height, bucket.width)


def test_few_buckets_for_many_aspects() -> None:
    buckets = BudgetBuckets(frames=5, max_pixels=480 * 832, aspect_tolerance=0.1, multiple=16)
    found = {buckets.choose(frames=5, height=1000, width=width) for width in range(500, 2000)}
    assert len(found) <= 1 + math.log(4) / (-2 * math.log(0.9)) + 1


@pytest.mark.parametrize("source", [(1080, 1920), (49, 65), (100, 1000), (7, 9)])
def test_a_cover_leaves_nothing_empty(source: tuple[int, int]) -> None:
    bucket = Bucket(5, 48, 64)
    for at in (0.0, 0.5, 1.0):
        crop = cover(bucket, height=source[0], width=source[1], across=at, down=at)
        assert 0 <= crop.top <= crop.height - 48
        assert 0 <= crop.left <= crop.width - 64
        assert abs(crop.width / crop.height / (source[1] / source[0]) - 1) < 0.03


def test_bad_bucket_entries() -> None:
    with pytest.raises(DataError, match=r"bucket \[48\]: expected"):
        parse_buckets([(48,)], 5)
    with pytest.raises(DataError, match="and num_frames"):
        parse_buckets([(48, 64)], None)
