"""f32, f16 and bf16 as tensor types: conversions without parameters to search."""

from __future__ import annotations

import numpy as np

from ...formats.floats import bf16_to_f32, f32_to_bf16
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, load_half, store, store_half
from .codec import Codec


@kernel
def _to_f16(x, out):
    """float32 [n] -> float16 as uint16 [n], n a multiple of 16."""
    for i in range(0, x.size, LANES):
        store_half(out, i, load(x, i))


@kernel
def _from_f16(words, out):
    """float16 as uint16 [n] -> float32 [n], n a multiple of 16."""
    for i in range(0, words.size, LANES):
        store(out, i, load_half(words, i))


def _padded(flat: np.ndarray) -> np.ndarray:
    """A vector padded with zeros to a multiple of 16 elements."""
    return np.pad(flat, (0, -flat.size % LANES))


def _encode_f32(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return x.copy().view(np.uint8)


def _decode_f32(q: np.ndarray, n: int) -> np.ndarray:
    return q.copy().view(np.float32)


def _encode_f16(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Nearest, ties to even. What overflows float16 becomes its largest finite number: encoders always give finite output."""
    flat = x.reshape(-1)
    if flat.size % LANES:
        flat = _padded(flat)
    out = np.empty(flat.size, np.uint16)
    _to_f16(flat, out)
    return out[: x.size].reshape(x.shape).view(np.uint8)


def _decode_f16(q: np.ndarray, n: int) -> np.ndarray:
    words = q.view(np.uint16).reshape(-1)
    size = words.size
    if size % LANES:
        words = _padded(words)
    out = np.empty(words.size, np.float32)
    _from_f16(words, out)
    return out[:size].reshape(-1, n)


def _encode_bf16(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return f32_to_bf16(x).view(np.uint8)


def _decode_bf16(q: np.ndarray, n: int) -> np.ndarray:
    return bf16_to_f32(q.view(np.uint16))


CODECS: dict[str, Codec] = {
    "f32": Codec(_encode_f32, _decode_f32, rounds=True),
    "f16": Codec(_encode_f16, _decode_f16, rounds=True),
    "bf16": Codec(_encode_bf16, _decode_bf16, rounds=True),
}
