"""Two texts beside each other, with what differs marked."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


def marked_texts(a: str, b: str) -> tuple[str, str]:
    """HTML of both texts; words and signs that the other one has not in this place are in <mark>."""
    left, right = _WORD.findall(a), _WORD.findall(b)
    out: tuple[list[str], list[str]] = [], []
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for parts, words in zip(out, (left[i:j], right[k:m]), strict=True):
            text = escape("".join(words))
            parts.append(f"<mark>{text}</mark>" if text and tag != "equal" else text)
    return "".join(out[0]), "".join(out[1])


def common_words(a: str, b: str) -> tuple[int, int]:
    """How many words both texts begin with, and how many the shorter one has."""
    left, right = a.split(), b.split()
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter), shorter
