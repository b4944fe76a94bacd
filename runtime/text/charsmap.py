"""Checks SentencePiece's character maps (`precompiled_charsmap`), which the `tokenizers` library follows without looking.

A map is a 4-byte size, a double array of that many bytes (darts-clone: https://github.com/s-yata/darts-clone) and the texts
that it leads to, each ended by a NUL. A unit of the array has the label of the byte that leads to it (bits 0 to 7, and 31: it
is a value), the distance to the block of its children (bits 10 to 30, shifted by 8 if bit 9 is set) and whether a value is
there (bit 8).
"""

from __future__ import annotations

import numpy as np

from ...formats import FormatError

_MAX_BYTES = 4 << 20  # SentencePiece's own maps have up to 320 KB
_AT_ONCE = 1 << 12  # nodes that are looked at together
_IS_VALUE = np.uint32(1 << 31)


def check_charsmap(data: np.ndarray) -> None:
    """Raises FormatError for a map, uint8 [n], with which some text would lead out of the array or of the texts: the library
    ends then as a program does that has a fault of its own."""
    raw = data.tobytes()
    size = int.from_bytes(raw[:4], "little")
    if len(raw) > _MAX_BYTES or len(raw) < 4 + size or size % 4 or not size:
        raise FormatError(_message(f"it has {len(raw)} bytes, and says that its array has {size}"))
    units = np.frombuffer(raw, "<u4", size // 4, 4)
    texts = raw[4 + size :]
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(_message("its texts are not UTF-8")) from None
    values = _values(units)
    if values.size and (int(values.max()) > len(texts) or _within_characters(texts, values).any()):
        raise FormatError(_message("a value is no place of a text"))


def _values(units: np.ndarray) -> np.ndarray:
    """The values, uint32 [n], of all texts that the array (uint32) knows. Raises FormatError where one leads out of it."""
    seen = np.zeros(len(units), bool)
    blocks = np.array([_offsets(units[:1])[0]], np.int64)
    values: list[np.ndarray] = []
    while blocks.size:
        # `block ^ byte` is looked up for every byte of a text.
        if int((blocks | 0xFF).max()) >= len(units):
            raise FormatError(_message("its array leads out of itself"))
        seen[blocks] = True
        found: list[np.ndarray] = []
        for start in range(0, len(blocks), _AT_ONCE):
            labels = np.arange(1, 256, dtype=np.int64)
            children = blocks[start : start + _AT_ONCE, None] ^ labels
            # the library compares all bits of a label with the byte, that of values among them
            reached = children[(units[children] & (_IS_VALUE | np.uint32(0xFF))) == labels]
            following = reached ^ _offsets(units[reached])
            ends = following[(units[reached] >> np.uint32(8) & np.uint32(1)).astype(bool)]
            if ends.size and int(ends.max()) >= len(units):
                raise FormatError(_message("its array leads out of itself"))
            values.append(units[ends] & ~_IS_VALUE)
            found.append(following)
        blocks = np.unique(np.concatenate(found))
        inside = blocks < len(units)
        blocks = blocks[~(inside & seen[np.where(inside, blocks, 0)])]
    return np.concatenate(values) if values else np.empty(0, np.uint32)


def _offsets(units: np.ndarray) -> np.ndarray:
    """How far the children of units are, int64 [n]."""
    return (units >> np.uint32(10)).astype(np.int64) << ((units & np.uint32(1 << 9)) >> np.uint32(6)).astype(np.int64)


def _within_characters(texts: bytes, places: np.ndarray) -> np.ndarray:
    """Whether a place is not the beginning of a character, nor the end, bool [n]."""
    padded = np.frombuffer(texts + b"\0", np.uint8)
    return padded[places] & 0xC0 == 0x80


def _message(reason: str) -> str:
    return f"the character map (tokenizer.ggml.precompiled_charsmap) is damaged: {reason}"
