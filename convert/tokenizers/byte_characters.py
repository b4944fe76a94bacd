"""GPT-2's printable characters for bytes: how byte-level vocabularies spell tokens."""

from __future__ import annotations

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # of Latin-1: these are themselves
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
CHARACTERS = [chr(b) if b in _PRINTABLE else chr(0x100 + _OTHERS.index(b)) for b in range(256)]


def spelt(token: bytes) -> str:
    """The text that stands for these bytes."""
    return "".join(CHARACTERS[b] for b in token)
