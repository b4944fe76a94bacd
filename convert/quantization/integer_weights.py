"""Weights of small integers: (code - zero point) * scale, where groups of columns share scale and zero point.

Codes are packed into bytes, lowest bits first: code c of a row is in the row's bits [c * bits, (c + 1) * bits).
compressed-tensors packs any number of bits like this, GPTQ too once its words are transposed, and int8 once its top bit is
flipped.
"""

from __future__ import annotations

import numpy as np

from ...formats import FormatError
from ...formats.floats import bf16_to_f32, f16_to_f32
from ...formats.fp8 import fp8_to_f32
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .stored_weights import Rows, StoredWeight

SCALE_DTYPES = ("F32", "F16", "BF16")

_TWO_23 = np.float32(1 << 23)


@kernel
def _plus_two_23(code):
    """2^23 + code as float32, exact: the code becomes the mantissa."""
    return np.uint32(code | np.uint32(0x4B000000)).view(np.float32)


@kernel
def _unpack(row, bits, flip, out):
    """2^23 + each code of a row, float32. One loop over the whole row per case: LLVM vectorises these."""
    if bits == 8:
        for i in range(out.size):
            out[i] = _plus_two_23(np.uint32(row[i] ^ flip))
        return
    mask, done = np.uint32((1 << bits) - 1), 0
    if bits == 4:
        for i in range(out.size // 2):
            byte = np.uint32(row[i])
            out[2 * i] = _plus_two_23(byte & np.uint32(15))
            out[2 * i + 1] = _plus_two_23(byte >> np.uint32(4))
        done = out.size // 2 * 2
    elif bits == 2:
        for i in range(out.size // 4):
            byte = np.uint32(row[i])
            out[4 * i] = _plus_two_23(byte & np.uint32(3))
            out[4 * i + 1] = _plus_two_23((byte >> np.uint32(2)) & np.uint32(3))
            out[4 * i + 2] = _plus_two_23((byte >> np.uint32(4)) & np.uint32(3))
            out[4 * i + 3] = _plus_two_23(byte >> np.uint32(6))
        done = out.size // 4 * 4
    else:
        for i in range(out.size // 8):  # eight codes take as many bytes as a code has bits
            packed = np.uint64(0)
            for b in range(bits):
                packed |= np.uint64(row[i * bits + b]) << np.uint64(8 * b)
            for c in range(8):
                out[8 * i + c] = _plus_two_23(np.uint32(packed >> np.uint64(c * bits)) & mask)
        done = out.size // 8 * 8
    for c in range(done, out.size):
        bit = c * bits
        code = np.uint32(row[bit >> 3])
        if (bit & 7) + bits > 8:
            code |= np.uint32(row[(bit >> 3) + 1]) << np.uint32(8)
        out[c] = _plus_two_23((code >> np.uint32(bit & 7)) & mask)


@kernel
def _dequantise_row(row, bits, flip, scale, zero, group_size, out):
    """As `dequantise`, of one row."""
    _unpack(row, bits, flip, out)
    for g in range(scale.size):
        s, z, group = scale[g], zero[g] + _TWO_23, out[g * group_size : min(out.size, (g + 1) * group_size)]
        for i in range(group.size):
            group[i] = (group[i] - z) * s


@kernel
def dequantise(codes, bits, flip, scale, zero, group_size, out):
    """codes uint8 [rows, bytes], scale and zero float32 [rows, groups of group_size columns] -> out float32 [rows, columns].

    bits: 1 to 8, per code; flip: uint8 that is XORed to 8-bit codes (128 makes int8 unsigned).
    """
    for r in range(codes.shape[0]):
        _dequantise_row(codes[r], bits, flip, scale[r], zero[r], group_size, out[r])


@kernel
def scale_by_index(index, scale, zero, out):
    """In place: out[r, c] = (out[r, c] - zero[r, index[c]]) * scale[r, index[c]]; index int32 [columns]: group of a column."""
    for r in range(out.shape[0]):
        row, s, z = out[r], scale[r], zero[r]
        for c in range(index.size):
            g = np.uint32(index[c])
            row[c] = (row[c] - z[g]) * s[g]


@kernel
def _transpose(words, first, out):
    """words [n, m], out [k, n]: out[j, i] = words[i, first + j], in squares as wide as a cache line."""
    for a in range(0, words.shape[0], 16):
        for b in range(0, out.shape[0], 16):
            for i in range(a, min(a + 16, words.shape[0])):
                for j in range(b, min(b + 16, out.shape[0])):
                    out[j, i] = words[i, first + j]


def transposed_words(stored: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Columns [start, stop) of a matrix of 32-bit words, transposed: uint32 [stop - start, rows of the matrix]."""
    words = np.require(stored.data, requirements=["C", "A"]).view(np.uint32)
    words.flags.writeable = False
    out = np.empty((stop - start, len(words)), np.uint32)
    _transpose(words, start, out)
    return out


def to_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored words of a safetensors float dtype, of any shape -> float32 of that shape, C-contiguous."""
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


def unpack_codes(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """int32 words [rows, n] of packed codes -> uint8 [rows, columns]; for small tables of zero points."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    code_bits = np.unpackbits(raw, axis=1, bitorder="little")[:, : columns * bits].reshape(len(words), columns, bits)
    return np.packbits(code_bits, axis=2, bitorder="little")[..., 0]


def check_tensor(tensor: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raises FormatError unless the tensor has one of these dtypes and this shape."""
    if tensor.dtype not in dtypes:
        raise FormatError(f"{tensor.path}: {tensor.name} is {tensor.dtype}; {' or '.join(dtypes)} is needed")
    if tensor.shape != shape:
        raise FormatError(f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, not {list(shape)}")


class DecodedWeight(StoredWeight):
    """A weight whose stored bytes are in no ggml type; subclasses implement `read_run`."""

    __slots__ = ()

    def __init__(self, stored: StoredTensor, shape: tuple[int, ...], source_type: str):
        self._describe(stored, shape, source_type)

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns]."""
        raise NotImplementedError

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns]. For single rows, the run that contains them all is decoded."""
        if isinstance(rows, slice):
            return self.read_run(rows.start, rows.stop)
        first = int(rows.min())
        return self.read_run(first, int(rows.max()) + 1)[rows - first]


def columns_per_group(groups: int, columns: int, group_size: int | None = None) -> int:
    """Columns that share a scale in rows of this many groups: group_size if it fits, else columns / groups, else 0."""
    if group_size and group_size > 0 and -(-columns // group_size) == groups:
        return group_size
    return columns // groups if groups and columns % groups == 0 else 0
