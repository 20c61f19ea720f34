"""Cleaning of captions."""

from __future__ import annotations

import pytest

from mm_trainer.data.video.captions import clean


@pytest.mark.parametrize(
    ("level", "text", "expected"),
    [
        (None, "  as   it\nis &amp;amp; ", "  as   it\nis &amp;amp; "),
        ("whitespace", "  a\t b\u00a0\n c ", "a b c"),
        ("basic", "cafÃ© &amp;amp; tea", "café & tea"),
        (
            "caption",
            "A “Dog” <b>runs</b>!!!! see https://x.org/y?z me@x.org @dog IMG_1234.jpg #12",
            'a "dog" runs! see',
        ),
        ("caption", "Red car () , 4 wheels - 20240131 ab12cd34ef9", "red car, 4 wheels"),
        ("caption", "", ""),
    ],
)
def test_levels(level: str | None, text: str, expected: str) -> None:
    assert clean(text, level) == expected  # type: ignore[arg-type]
