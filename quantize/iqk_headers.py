"""Where the IQK types keep the scale codes and table flags of a super-block (spec B).

Each header has `write(blocks, levels, flags)`, which fills in bytes that are 0 so far, and `read(blocks)`, its inverse.
blocks: uint8 [super-blocks, bytes]; levels: whole float32 numbers and flags: uint8, both [super-blocks, 16 or 8].
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Header(Protocol):
    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None: ...

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


def _put_word(blocks: np.ndarray, at: int, bits: np.ndarray) -> None:
    """Sixteen bits [blocks, 16] as the little-endian word at byte `at`."""
    blocks[:, at : at + 2] |= np.packbits(bits, axis=1, bitorder="little")


def _bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The inverse of _put_word: uint8 [blocks, 16]."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 2]), axis=1, bitorder="little")


def _put_nibbles(blocks: np.ndarray, at: int, codes: np.ndarray) -> None:
    """Codes [blocks, 16] below 16, two to a byte, from byte `at` on."""
    blocks[:, at : at + 8] = codes[:, 0::2] | (codes[:, 1::2] << 4)


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    packed = blocks[:, at : at + 8]
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 16)


class FourBit:
    """iq2_k: flags, then codes level + 8 of four bits."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        _put_nibbles(blocks, 4, (levels + 8).astype(np.uint8))

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _nibbles(blocks, 4).astype(np.float32) - 8, _bits(blocks, 2)


class OddWithSign:
    """iq3_k: flags, signs, then codes (|level| - 1) / 2 of four bits."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        _put_word(blocks, 4, levels < 0)
        _put_nibbles(blocks, 6, np.maximum(np.abs(levels) - 1, 0).astype(np.uint8) >> 1)

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        odd = 2 * _nibbles(blocks, 6).astype(np.float32) + 1
        return np.where(_bits(blocks, 4), -odd, odd), _bits(blocks, 2)


class SixBit:
    """iq4_k, iq5_k: flags, then codes level + 32: their high two bits in four bytes, the low nibbles in eight."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        codes = (levels + 32).astype(np.uint8)
        _put_word(blocks, 2, flags)
        high = (codes >> 4).reshape(-1, 4, 4)
        blocks[:, 4:8] = high[..., 0] | (high[..., 1] << 2) | (high[..., 2] << 4) | (high[..., 3] << 6)
        _put_nibbles(blocks, 8, codes & 15)

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        high = (blocks[:, 4:8, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
        codes = _nibbles(blocks, 8) | (high.reshape(-1, 16) << 4)
        return codes.astype(np.float32) - 32, _bits(blocks, 2)


class OddByte:
    """iq4_ks, iq5_ks: a byte level + 127 for each 32 weights; levels are odd, so its lowest bit is free and holds the flag."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        blocks[:, :8] = (levels + 127).astype(np.uint8) | flags

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (blocks[:, :8] & 254).astype(np.float32) - 127, blocks[:, :8] & 1


class SignedByte:
    """iq6_k: flags, then a signed byte for each 16 weights."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        _put_word(blocks, 2, flags)
        blocks[:, 4:20] = levels.astype(np.int8).view(np.uint8)

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return blocks[:, 4:20].copy().view(np.int8).astype(np.float32), _bits(blocks, 2)


class FiveBit:
    """iq3_ks: high bits of the codes level + 16, then flags, then the low nibbles, those of blocks 4 apart in one byte."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        codes = (levels + 16).astype(np.uint8)
        _put_word(blocks, 0, np.concatenate([codes >> 4, flags], axis=1))
        blocks[:, 2:6] = (codes[:, :4] & 15) | (codes[:, 4:] << 4)

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = _bits(blocks, 0)
        codes = np.concatenate([blocks[:, 2:6] & 15, blocks[:, 2:6] >> 4], axis=1) | (bits[:, :8] << 4)
        return codes.astype(np.float32) - 16, bits[:, 8:]


class FiveBitSwapped:
    """iq2_ks: flags, then the high bits of codes level + 16, then the codes' low nibbles, those of neighbours in one byte."""

    @staticmethod
    def write(blocks: np.ndarray, levels: np.ndarray, flags: np.ndarray) -> None:
        codes = (levels + 16).astype(np.uint8)
        _put_word(blocks, 0, np.concatenate([flags, codes >> 4], axis=1))
        blocks[:, 2:6] = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)

    @staticmethod
    def read(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = _bits(blocks, 0)
        low = np.stack([blocks[:, 2:6] & 15, blocks[:, 2:6] >> 4], axis=2).reshape(-1, 8)
        return (low | (bits[:, 8:] << 4)).astype(np.float32) - 16, bits[:, :8]
