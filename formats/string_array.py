"""Arrays of strings as they stand in a header: a vocabulary has half a million of them, and most jobs need none or few."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .lazy_sequence import LazySequence

LENGTH = 8  # bytes in front of each string: its length in bytes, little-endian
_LEAST_WINDOW, _WINDOW = 1 << 12, 1 << 20  # bytes of which `string_starts` looks for lengths at once
_RUN = 256  # lengths that are read one by one where those do not agree


class StringArray(LazySequence[str]):
    """Strings that are decoded when they are asked for; bytes that are not UTF-8 become surrogates (surrogateescape).

    payload  the strings in the file's form, each behind its length
    starts   int64 [n + 1]: where in the payload each one's length is, and where the last one ends
    """

    def __init__(self, payload: bytes, starts: np.ndarray):
        self.payload, self.starts = payload, array("q", starts.tobytes())  # whose items are read faster than numpy's

    @classmethod
    def of(cls, strings: Iterable[str]) -> StringArray:
        """These strings; lone surrogates of an escape become their bytes."""
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        payload = b"".join(part for text in encoded for part in (len(text).to_bytes(LENGTH, "little"), text))
        return cls(payload, np.concatenate([[0], np.cumsum(lengths + LENGTH)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def item(self, number: int) -> str:
        return self.payload[self.starts[number] + LENGTH : self.starts[number + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        payload, bounds = self.payload, self.starts
        for start, end in pairwise(bounds):
            yield payload[start + LENGTH : end].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self.payload == other.payload
        return isinstance(other, list) and len(other) == len(self) and list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def numbers_of(strings: Sequence[str], texts: Collection[str], without: int = 0) -> Sequence[int]:
    """Numbers, ascending, of strings among which are all that are one of these texts; of a `StringArray` those of a text's
    length in bytes, first and last byte. without: bytes of a string, neither its first nor its last, that a text lacks."""
    if not isinstance(strings, StringArray):
        return range(len(strings))
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    wanted = [_key(len(text), text[0], text[-1]) for text in encoded if text]
    starts, content = np.frombuffer(strings.starts, np.int64), np.frombuffer(strings.payload, np.uint8)
    lengths = byte_lengths(strings) - without
    some = np.flatnonzero(lengths > 0)
    first, last = content[starts[some] + LENGTH], content[starts[some + 1] - 1]
    found = some[np.isin(_key(lengths[some], first.astype(np.int64), last.astype(np.int64)), np.array(wanted, np.int64))]
    return np.union1d(found, np.flatnonzero(lengths == 0)).tolist() if "" in texts else found.tolist()


def all_have_inner_space(strings: Sequence[str]) -> bool:
    """Whether each has a space behind its first character."""
    if not isinstance(strings, StringArray):
        return all(" " in string[1:] for string in strings)
    starts, content = np.frombuffer(strings.starts, np.int64), np.frombuffer(strings.payload, np.uint8)
    spaces = np.append(np.flatnonzero(content == ord(" ")), content.size)
    first = spaces[np.minimum(np.searchsorted(spaces, starts[:-1] + LENGTH + 1), len(spaces) - 1)]
    return bool((first < starts[1:]).all())


def byte_lengths(strings: Sequence[str]) -> np.ndarray:
    """Bytes of each string in UTF-8, int64 [n]."""
    if isinstance(strings, StringArray):
        return np.diff(np.frombuffer(strings.starts, np.int64)) - LENGTH
    return np.array([len(string.encode("utf-8", "surrogateescape")) for string in strings], np.int64)


def is_list_of_strings(value: Any) -> bool:
    return isinstance(value, StringArray) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _key(length: Any, first: Any, last: Any) -> Any:
    return length << 16 | first << 8 | last


def string_starts(buffer: mmap.mmap | bytes, position: int, count: int) -> tuple[np.ndarray, bool]:
    """Where each of `count` strings begins, and the end of the last, int64 [found + 1], and whether all are within the buffer.

    Of most strings the seven upper bytes of the length are zero, which no text has. Where such runs of zeros are as far from
    each other as the lengths between them say, they are all the strings that there are; else some lengths are read one by one,
    and the window in which to look is made smaller.
    """
    found, size, window, length_at = array("q", [position]), len(buffer), _WINDOW, struct.Struct("<Q").unpack_from
    while len(found) <= count and position + LENGTH <= size:
        content = np.frombuffer(buffer, np.uint8, min(window, size - position), position)
        begins = _zero_runs(content)
        ends = begins + LENGTH + content[begins]
        agreed = 0
        if len(begins) > 1 and begins[0] == 0:
            differing = np.flatnonzero(begins[1:] != ends[:-1])
            agreed = min(int(differing[0]) if len(differing) else len(begins) - 1, count + 1 - len(found))
        del content  # the file can be closed
        if agreed:
            found.frombytes((position + ends[:agreed]).astype(np.int64).tobytes())
            position = found[-1]
            window = min(2 * window, _WINDOW)
            continue
        for _ in range(min(_RUN, count + 1 - len(found))):
            length = length_at(buffer, position)[0] if position + LENGTH <= size else size
            if length > size - position - LENGTH:
                return np.frombuffer(found, np.int64), False
            position += LENGTH + length
            found.append(position)
        window = max(window // 4, _LEAST_WINDOW)
    return np.frombuffer(found, np.int64), len(found) == count + 1


def _zero_runs(content: np.ndarray) -> np.ndarray:
    """int64: the bytes before each run of seven zeros of uint8 [n]."""
    zero = content == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]  # begins at each of these
    return np.flatnonzero(seven[1:])
