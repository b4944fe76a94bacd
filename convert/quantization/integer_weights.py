"""Weights of small whole numbers: (code - zero) * scale, where runs of columns share scale and zero.

Codes lie in bytes, the lowest bits first: code c of a row in its bits [c * bits, (c + 1) * bits). That is what
compressed-tensors writes for any number of bits, GPTQ when its words are turned round, and int8 with the top bit flipped.
"""

from __future__ import annotations

import numpy as np

from ...formats import FormatError
from ...formats.floats import bf16_to_f32, f16_to_f32, fp8_to_f32
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .stored_weights import Rows, Weight

SCALES = ("F32", "F16", "BF16")


_RAISED = np.float32(1 << 23)


@kernel
def _raised(code):
    """2^23 + code, exact: the code is put into the last bits."""
    return np.uint32(code | np.uint32(0x4B000000)).view(np.float32)


@kernel
def _unpack(row, bits, flip, out):
    """2^23 + each code of a row, float32. Loops over all of a row are the ones that the compiler makes fast."""
    if bits == 8:
        for i in range(out.size):
            out[i] = _raised(np.uint32(row[i] ^ flip))
        return
    mask, done = np.uint32((1 << bits) - 1), 0
    if bits == 4:
        for i in range(out.size // 2):
            byte = np.uint32(row[i])
            out[2 * i] = _raised(byte & np.uint32(15))
            out[2 * i + 1] = _raised(byte >> np.uint32(4))
        done = out.size // 2 * 2
    elif bits == 2:
        for i in range(out.size // 4):
            byte = np.uint32(row[i])
            out[4 * i] = _raised(byte & np.uint32(3))
            out[4 * i + 1] = _raised((byte >> np.uint32(2)) & np.uint32(3))
            out[4 * i + 2] = _raised((byte >> np.uint32(4)) & np.uint32(3))
            out[4 * i + 3] = _raised(byte >> np.uint32(6))
        done = out.size // 4 * 4
    else:
        for i in range(out.size // 8):  # eight codes are as many bytes as a code has bits
            eight = np.uint64(0)
            for b in range(bits):
                eight |= np.uint64(row[i * bits + b]) << np.uint64(8 * b)
            for c in range(8):
                out[8 * i + c] = _raised(np.uint32(eight >> np.uint64(c * bits)) & mask)
        done = out.size // 8 * 8
    for c in range(done, out.size):
        bit = c * bits
        code = np.uint32(row[bit >> 3])
        if (bit & 7) + bits > 8:
            code |= np.uint32(row[(bit >> 3) + 1]) << np.uint32(8)
        out[c] = _raised((code >> np.uint32(bit & 7)) & mask)


@kernel
def _widen(row, bits, flip, scale, zero, per, out):
    """One row: uint8 codes -> float32 out; column c has scale and zero number c // per. flip: bits of 8-bit codes to turn."""
    _unpack(row, bits, flip, out)
    for g in range(scale.size):
        s, z, to = scale[g], zero[g] + _RAISED, out[g * per : min(out.size, (g + 1) * per)]
        for i in range(to.size):
            to[i] = (to[i] - z) * s


@kernel
def widen_codes(codes, bits, flip, scale, zero, per, out):
    """codes uint8 [rows, bytes], scale and zero float32 [rows, groups of `per` columns] -> out float32 [rows, columns].

    bits: 1 to 8; flip: uint8 that 8-bit codes are combined with by exclusive or (128 makes int8 unsigned).
    """
    for r in range(codes.shape[0]):
        _widen(codes[r], bits, flip, scale[r], zero[r], per, out[r])


@kernel
def scale_by_index(index, scale, zero, out):
    """In place: out[r, c] = (out[r, c] - zero[r, index[c]]) * scale[r, index[c]]; index int32 [columns]."""
    for r in range(out.shape[0]):
        row, s, z = out[r], scale[r], zero[r]
        for c in range(index.size):
            g = np.uint32(index[c])
            row[c] = (row[c] - z[g]) * s[g]


@kernel
def _turn(words, first, out):
    """words [n, m], out [k, n]: out[j, i] = words[i, first + j], in squares that a cache line of either fills."""
    for a in range(0, words.shape[0], 16):
        for b in range(0, out.shape[0], 16):
            for i in range(a, min(a + 16, words.shape[0])):
                for j in range(b, min(b + 16, out.shape[0])):
                    out[j, i] = words[i, first + j]


def turned(stored: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Columns of a matrix of 32-bit words as rows: uint32 [stop - start, rows of the matrix]."""
    words = np.require(stored.data, requirements=["C", "A"]).view(np.uint32)
    words.flags.writeable = False
    out = np.empty((stop - start, len(words)), np.uint32)
    _turn(words, start, out)
    return out


def as_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored words of a safetensors dtype, of any shape -> float32 of that shape, C-contiguous."""
    values = np.ascontiguousarray(values)
    match dtype:
        case "BF16":
            return bf16_to_f32(values)
        case "F16":
            return f16_to_f32(values)
        case "F8_E4M3":
            flat = values.reshape(1, -1)
            return fp8_to_f32(flat, "f8_e4m3", np.ones((1, 1), np.float32), max(1, flat.size)).reshape(values.shape)
    return values.astype(np.float32, copy=False)


def unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """int32 words [rows, n] of codes along each row -> uint8 [rows, columns]; for small tables of zero points."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    spread = np.unpackbits(raw, axis=1, bitorder="little")[:, : columns * bits].reshape(len(words), columns, bits)
    return np.packbits(spread, axis=2, bitorder="little")[..., 0]


def demand(tensor: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> StoredTensor:
    """The tensor, if it is of one of these types and of this shape. Raises FormatError."""
    if tensor.dtype not in dtypes:
        raise FormatError(f"{tensor.path}: {tensor.name} is {tensor.dtype}; {' or '.join(dtypes)} is needed")
    if tensor.shape != shape:
        raise FormatError(f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, not {list(shape)}")
    return tensor


class DecodedWeight(Weight):
    """A weight that can only be had as float32; subclasses say how a run of rows is decoded."""

    __slots__ = ()

    def __init__(self, stored: StoredTensor, shape: tuple[int, ...], source_type: str):
        self._describe(stored, shape, source_type)

    def run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns]."""
        raise NotImplementedError

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns]. For single rows the run that holds them all is decoded."""
        if isinstance(rows, slice):
            return self.run(rows.start, rows.stop)
        first = int(rows.min())
        return self.run(first, int(rows.max()) + 1)[rows - first]


def share(count: int, columns: int, group: int | None = None) -> int:
    """Columns per scale where there are `count` of them for a row: the group size that was told, if it fits, else even shares.

    0 if neither fits.
    """
    if group and group > 0 and -(-columns // group) == count:
        return group
    return columns // count if count and columns % count == 0 else 0
