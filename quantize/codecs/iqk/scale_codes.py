"""The scale codes and table flags in superblocks of the IQK types (docs/formats/layouts.md).

Each class has `write(blocks, int_scales, flags)`, which fills in bytes that are 0 before, and a number by which `read_header`,
its inverse in kernels, knows it. blocks: uint8 [superblocks, bytes]; int_scales: integer block scales as float32, and flags:
uint8, both [superblocks, 16 or 8].
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ....simd.byte_lanes import bytes_from_words, i8_to_float, nonzero, u8_to_float, unpack_1bit, unpack_2bit, unpack_4bit
from ....simd.compile import kernel
from ....simd.lanes import mask_bits, mask_from_bits, select


class ScaleCodes(Protocol):
    number: int

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None: ...


def _put_word(blocks: np.ndarray, at: int, bits: np.ndarray) -> None:
    """Sixteen bits [blocks, 16] as the little-endian word at byte `at`."""
    blocks[:, at : at + 2] |= np.packbits(bits, axis=1, bitorder="little")


def _put_nibbles(blocks: np.ndarray, at: int, codes: np.ndarray) -> None:
    """Codes [blocks, 16] below 16, two to a byte, from byte `at` on."""
    blocks[:, at : at + 8] = codes[:, 0::2] | (codes[:, 1::2] << 4)


class FourBitScales:
    """iq2_k: flags, then codes scale + 8 of four bits."""

    number = 0

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        _put_nibbles(blocks, 4, (int_scales + 8).astype(np.uint8))


class OddScalesWithSigns:
    """iq3_k: flags, signs, then codes (|scale| - 1) / 2 of four bits."""

    number = 1

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        _put_word(blocks, 4, int_scales < 0)
        _put_nibbles(blocks, 6, np.maximum(np.abs(int_scales) - 1, 0).astype(np.uint8) >> 1)


class SixBitScales:
    """iq4_k, iq5_k: flags, then codes scale + 32: their high two bits in four bytes, the low nibbles in eight."""

    number = 2

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        codes = (int_scales + 32).astype(np.uint8)
        _put_word(blocks, 2, flags)
        high = (codes >> 4).reshape(-1, 4, 4)
        blocks[:, 4:8] = high[..., 0] | (high[..., 1] << 2) | (high[..., 2] << 4) | (high[..., 3] << 6)
        _put_nibbles(blocks, 8, codes & 15)


class OddByteScales:
    """iq4_ks, iq5_ks: a byte scale + 127 for each 32 weights; scales are odd, so its lowest bit is free and holds the flag."""

    number = 3

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        blocks[:, :8] = (int_scales + 127).astype(np.uint8) | flags


class SignedByteScales:
    """iq6_k: flags, then a signed byte for each 16 weights."""

    number = 4

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        blocks[:, 4:20] = int_scales.astype(np.int8).view(np.uint8)


class FiveBitScalesBeforeFlags:
    """iq3_ks: high bits of the codes scale + 16, then flags, then the low nibbles, those of blocks 4 apart in one byte."""

    number = 5

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        codes = (int_scales + 16).astype(np.uint8)
        _put_word(blocks, 0, np.concatenate([codes >> 4, flags], axis=1))
        blocks[:, 2:6] = (codes[:, :4] & 15) | (codes[:, 4:] << 4)


class FiveBitScalesAfterFlags:
    """iq2_ks: flags, then the high bits of codes scale + 16, then the codes' low nibbles, those of neighbours in one byte."""

    number = 6

    @staticmethod
    def write(blocks: np.ndarray, int_scales: np.ndarray, flags: np.ndarray) -> None:
        codes = (int_scales + 16).astype(np.uint8)
        _put_word(blocks, 0, np.concatenate([flags, codes >> 4], axis=1))
        blocks[:, 2:6] = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)


_FOUR_BIT, _ODD_WITH_SIGNS, _SIX_BIT = FourBitScales.number, OddScalesWithSigns.number, SixBitScales.number
_ODD_BYTE, _SIGNED_BYTE = OddByteScales.number, SignedByteScales.number
_FIVE_BIT_BEFORE_FLAGS = FiveBitScalesBeforeFlags.number


@kernel
def read_header(number, a, b, c):
    """(table flags as bits, integer block scales as lanes) of a superblock that begins with the 64-bit words a, b, c.

    Where a superblock has only eight blocks, the other bits and lanes have no meaning.
    """
    flags = a >> 16
    if number == _FOUR_BIT:
        return flags, u8_to_float(unpack_4bit(_from_bit(32, a, b))) - 8
    if number == _ODD_WITH_SIGNS:
        odd = u8_to_float(unpack_4bit(_from_bit(48, a, b)) << 1 | 1)
        return flags, select(mask_from_bits(a >> 32), -odd, odd)
    if number == _SIX_BIT:
        return flags, u8_to_float(unpack_4bit(b) | unpack_2bit(a >> 32) << 4) - 32
    if number == _ODD_BYTE:
        codes = bytes_from_words(a, b)
        return mask_bits(nonzero(codes & 1)), u8_to_float(codes & 254) - 127
    if number == _SIGNED_BYTE:
        return flags, i8_to_float(bytes_from_words(_from_bit(32, a, b), _from_bit(32, b, c)))
    if number == _FIVE_BIT_BEFORE_FLAGS:
        low = bytes_from_words(flags & 0x0F0F0F0F | (flags >> 4 & 0x0F0F0F0F) << 32, 0)
        return a >> 8, u8_to_float(low | unpack_1bit(a) << 4) - 16
    return a, u8_to_float(unpack_4bit(flags) | unpack_1bit(a >> 8) << 4) - 16


@kernel
def _from_bit(bit, a, b):
    """The 64 bits from `bit` on (1 to 63) of two consecutive 64-bit words."""
    return (a >> bit & ((1 << (64 - bit)) - 1)) | b << (64 - bit)
