"""Instructions of NVIDIA's GPUs on words of four bytes, as functions of kernels; plain arithmetic in Triton's interpreter."""

# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_unsigned(a, b, c):
    """c + the sum of unsigned bytes of a times signed ones of b."""
    return tl.inline_asm_elementwise("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


@triton.jit
def dot_signed(a, b, c):
    """c + the sum of signed bytes of a times those of b."""
    return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


@triton.jit
def permute(a, b, places):
    """The bytes of a and b (4 to 7) by number: places has four bits for each of the result, of which the highest stands for
    eight times the byte's sign."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, places], tl.int32, True, 1)


def _dot(a, b, c, low):
    for i in range(4):
        byte = (a >> 8 * i) & 255
        signed = (b >> 8 * i) & 255
        c = c + (byte - (byte & low) * 2) * (signed - (signed & 128) * 2)
    return c


def _permute(a, b, places):
    word = (a ^ a) | (places ^ places)
    for i in range(4):
        place = (places >> 4 * i) & 15
        byte = tl.where((place & 4) != 0, b >> (place & 3) * 8, a >> (place & 3) * 8) & 255
        byte = tl.where((place & 8) != 0, (byte >> 7) * 255, byte)
        word = word | byte << 8 * i
    return word


def _dot_unsigned(a, b, c):
    return _dot(a, b, c, 0)


def _dot_signed(a, b, c):
    return _dot(a, b, c, 128)


IS_INTERPRETED = not isinstance(permute, triton.runtime.JITFunction)  # without an assembler
FUNCTIONS = {
    "dot_unsigned": _dot_unsigned if IS_INTERPRETED else dot_unsigned,
    "dot_signed": _dot_signed if IS_INTERPRETED else dot_signed,
    "permute": _permute if IS_INTERPRETED else permute,
}


@triton.jit
def store_bytes(numbers, group, inside, words, part_words, GROUPS: tl.constexpr):
    """Stores numbers [GROUPS, 32] as whole ones of 16 bits and scales (see `vector_bytes.py`). group: the number of each group
    in the vector; inside: whether it is there; words: where the vector's begin."""
    most = tl.max(tl.abs(numbers), axis=1)
    whole = numbers * tl.where(most > 0, 32512.0 / most, 0.0)[:, None]
    whole = tl.where(whole < 0, whole - 0.5, whole + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    low = whole - high * 256
    shifts = 8 * tl.arange(0, 4)[None, None, :]
    word = words + group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(word, tl.sum((tl.reshape(high, (GROUPS, 8, 4)) & 255) << shifts, axis=2), mask=inside[:, None])
    tl.store(word + part_words, tl.sum((tl.reshape(low, (GROUPS, 8, 4)) & 255) << shifts, axis=2), mask=inside[:, None])
    tl.store(words + 2 * part_words + group, (most / 32512.0).to(tl.int32, bitcast=True), mask=inside)
