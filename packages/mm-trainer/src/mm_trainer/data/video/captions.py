"""Cleaning of captions on the data side; off by default: a model's own tokenise step cleans as its reference does.

Each level does what the one before it does, and more:

- ``whitespace``: runs of white space become one blank, none at the ends;
- ``basic``: broken encodings are repaired (ftfy) and HTML entities resolved, twice, since scraped text escapes twice;
- ``caption``: for scraped alt texts: lower case, typographic quotes and dashes made plain, and what describes no
  picture removed (addresses, tags, handles, file names, long numbers and codes, runs of punctuation).
"""

from __future__ import annotations

import html
import re
from typing import Literal

import torch

from mm_trainer.errors import DataError
from mm_trainer.randomness import keyed_generator

TextCleaning = Literal["whitespace", "basic", "caption"]

_PLAIN = str.maketrans({"‘": "'", "’": "'", "´": "'", "“": '"', "”": '"', "«": '"', "»": '"', "–": "-", "—": "-"})
_REMOVED = [
    re.compile(pattern)
    for pattern in (
        r"<[^<>]{1,200}>",  # HTML tags
        r"(?:https?://|www\.)\S+",  # addresses
        r"\S+@\S+\.\w+",  # mail addresses
        r"(?<!\w)@[\w.]+",  # handles
        r"\b[\w-]+\.(?:jpe?g|png|gif|webp|bmp|svg|mp4|mov|avi|webm|html?|pdf)\b",  # file names
        r"\b\d{1,3}(?:\.\d{1,3}){3}\b",  # IP addresses
        r"#\d+\b",  # numbers of things
        r"\b\d{6,}\b",  # long numbers
        r"\b(?=\w*\d)(?=\w*[a-z])\w{9,}\b",  # codes of letters and digits
    )
]
_RUNS = re.compile(r"([\"'#*~_|<>{}()\[\]\\/:;,.!?=+-])\1{2,}")


def draw_caption(seed: int, sample_key: int) -> tuple[float, float]:
    """Two uniform numbers of one sample: the caption is dropped if the first is below the probability; the second picks
    one of several."""
    dropped, choice = torch.rand(2, generator=keyed_generator(seed, "caption", sample_key)).tolist()
    return dropped, choice


def clean(text: str, level: TextCleaning | None) -> str:
    """Clean a caption; with None it is returned unchanged.

    Raises:
        DataError: ``basic`` and ``caption`` need the package ftfy, and it isn't installed.
    """
    if level is None:
        return text
    if level != "whitespace":
        text = _mend(text)
    if level == "caption":
        text = _strip_caption(text)
    return " ".join(text.split())


def _mend(text: str) -> str:
    try:
        import ftfy
    except ModuleNotFoundError as error:
        raise DataError("clean_text: basic and caption need the package ftfy: pip install ftfy") from error
    mended: str = ftfy.fix_text(text)
    return html.unescape(html.unescape(mended))


def _strip_caption(text: str) -> str:
    text = text.lower().translate(_PLAIN)
    for pattern in _REMOVED:
        text = pattern.sub(" ", text)
    text = _RUNS.sub(r"\1", text)
    text = re.sub(r"\(\s*\)|\[\s*\]", " ", text)
    return re.sub(r"\s+([,.;:!?])", r"\1", text).strip(" -_:;,|\t\n")
