"""GGUF files of big-endian machines (s390x, POWER): headers and tensors with the bytes of every number reversed.

In such a file every number of the header is big-endian, and so are the numbers of more than a byte in the tensors; a file keeps
its size and its offsets. Source: `gguf_convert_endian` of llama.cpp's gguf package, which knows fewer types.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from ..data_classes import dataclass
from ..errors import FormatError, PlanError
from .gguf_header import align
from .gguf_parser import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, NUMBERS, STRING, VERSION
from .types import TYPES, TensorType

ByteOrder = Literal["little", "big"]
OTHER: dict[ByteOrder, ByteOrder] = {"little": "big", "big": "little"}
_MAX_DEPTH = 2  # of arrays in arrays

# type -> bytes of its blocks that are numbers of two bytes; other bytes of these types stand alone
_HALVES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q8_0": (0,),
    "q2_K": (80, 82),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
    "iq4_nl": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "mxfp4": (),
    "nvfp4": (),
}
_NUMBER_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


@dataclass(frozen=True)
class SwappedHeader:
    """A header in the other byte order.

    header          its bytes, padded as before: the data begins at len(header)
    names, kinds    of the tensors, as in its directory; of each kind the type and the size in bytes
    offsets         of their first bytes in the file, int64 [n]
    """

    header: bytes
    names: list[str]
    kinds: list[tuple[TensorType, int]]
    offsets: np.ndarray

    def located(self) -> Iterator[tuple[str, TensorType, int, int]]:
        """Name, type, first byte in the file and size of each tensor, in order of their places."""
        for i in np.argsort(self.offsets, kind="stable").data:
            yield self.names[i], self.kinds[i][0], self.offsets.item(i), self.kinds[i][1]


def byte_order(path: Path, start: bytes) -> ByteOrder:
    """The byte order of a GGUF file, of its first eight bytes. Raises FormatError for what is no GGUF of version 3."""
    if start[:4] != MAGIC:
        raise FormatError(f"{path}: not a GGUF file (it begins with {start[:4]!r})")
    for order in OTHER:
        if int.from_bytes(start[4:8], order) == VERSION:
            return order
    raise FormatError(f"{path}: neither byte order makes this GGUF one of version {VERSION}")


def swap_values(data: np.ndarray, kind: TensorType) -> np.ndarray:
    """Whole blocks of a tensor, uint8 [n], in the other byte order. Raises PlanError as `check_swappable`."""
    check_swappable(kind.name, kind)
    width = _NUMBER_BYTES.get(kind.name)
    if width is not None:
        return data.reshape(-1, width)[:, ::-1].reshape(-1)
    blocks = data.reshape(-1, kind.block_bytes).copy()
    for at in _HALVES[kind.name]:
        blocks[:, [at, at + 1]] = blocks[:, [at + 1, at]]
    return blocks.reshape(-1)


def check_swappable(name: str, kind: TensorType) -> None:
    """Raises PlanError for a tensor of a type whose order of bytes is not the same in every reader."""
    if kind.name not in _NUMBER_BYTES and kind.name not in _HALVES:
        raise PlanError(
            f"{name} is {kind.name}, which has no agreed form on big-endian machines; types that have: "
            + ", ".join((*_NUMBER_BYTES, *_HALVES))
        )


def swap_header(path: Path, data: memoryview, order: ByteOrder) -> SwappedHeader:
    """The header of a file, which is in `order`, in the other byte order.

    data: the file's bytes, from its first on. Raises FormatError for a header that is damaged, with the byte, and PlanError for
    tensors of a type that `check_swappable` refuses.
    """
    return _Swapper(path, data, order).swap()


class _Swapper:
    """One pass over a header, which reverses each number where it stands."""

    def __init__(self, path: Path, data: memoryview, order: ByteOrder):
        self.path, self.data, self.at = path, data, 4
        self.order: ByteOrder = order
        self.out = bytearray(MAGIC)

    def swap(self) -> SwappedHeader:
        self.number(4)  # the version
        n_tensors, n_keys = self.number(8), self.number(8)
        alignment = DEFAULT_ALIGNMENT
        for _ in range(n_keys):
            key = self.string()
            start, kind = self.at + 4, self.number(4)
            self.value(kind, 0)
            if key == b"general.alignment":
                alignment = int.from_bytes(self.data[start : self.at], self.order)
        if alignment <= 0 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment}; it has to be a power of two")
        names: list[str] = []
        kinds: list[tuple[TensorType, int]] = []
        known: dict[tuple[str, tuple[int, ...]], tuple[TensorType, int]] = {}
        offsets = array("Q")
        for _ in range(n_tensors):
            name, kind, shape, offset = self.entry()
            names.append(name)
            spelt = kind.name, shape
            if spelt not in known:
                known[spelt] = kind, kind.nbytes(shape) if kind.is_known else 0
            kinds.append(known[spelt])
            offsets.append(offset)
        start = align(self.at, alignment)
        for name, (kind, nbytes), offset in zip(names, kinds, offsets, strict=True):
            check_swappable(name, kind)
            if start + offset + nbytes > len(self.data):
                raise FormatError(f"{self.path}: tensor {name} reaches beyond the end of the file: truncated")
        self.out += bytes(start - len(self.out))
        places = np.array(offsets, np.uint64).astype(np.int64) + start
        order = np.argsort(places, kind="stable").tolist()
        for one, other in pairwise(order):
            if places[one] + kinds[one][1] > places[other]:
                raise FormatError(f"{self.path}: tensors {names[one]} and {names[other]} overlap")
        return SwappedHeader(bytes(self.out), names, kinds, places)

    def entry(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self.string().decode("utf-8", "backslashreplace")
        n_dims = self.number(4)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.error(f"tensor {name} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self.number(8) for _ in range(n_dims))
        kind, offset = TYPES.by_id(self.number(4)), self.number(8)
        if 0 in shape or prod(shape) >= 1 << 62 or (kind.is_known and not kind.fits(shape[0])):
            raise self.error(f"tensor {name} of type {kind.name} has the impossible shape {shape}")
        return name, kind, shape, offset

    def value(self, kind: int, depth: int) -> None:
        if kind in NUMBERS:
            self.numbers(NUMBERS[kind].itemsize, 1)
        elif kind == BOOL:
            self.numbers(1, 1)
        elif kind == STRING:
            self.string()
        elif kind == ARRAY and depth <= _MAX_DEPTH:
            item, count = self.number(4), self.number(8)
            if item in NUMBERS or item == BOOL:
                self.numbers(NUMBERS[item].itemsize if item in NUMBERS else 1, count)
                return
            for _ in range(count):
                self.value(item, depth + 1)
        else:
            raise self.error(f"unknown value type {kind}")

    def number(self, size: int) -> int:
        """An unsigned number of the header, of `size` bytes."""
        value = int.from_bytes(self.take(size), self.order)
        self.out += value.to_bytes(size, OTHER[self.order])
        return value

    def numbers(self, size: int, count: int) -> None:
        values = np.frombuffer(self.take(size * count), np.uint8)
        self.out += values.reshape(-1, size)[:, ::-1].tobytes()

    def string(self) -> bytes:
        text = bytes(self.take(self.number(8)))
        self.out += text
        return text

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise self.error("the file ends inside its header: truncated or damaged")
        self.at += count
        return self.data[self.at - count : self.at]

    def error(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem} (at byte {self.at})")
