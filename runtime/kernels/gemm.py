"""Matrix products of many tokens with packed weights of any type.

Weights are taken from their packed bytes, a few hundred rows at a time, and every row is unpacked once for all tokens:

* On a processor with bf16 tiles (AMX) everything is multiplied as bf16, which rounds activations far less than eight bits do.
  bf16 weights, which are exact then, get activations as sums of two bf16 numbers: their products are those of float32 up to
  about 2^-16 of the largest.
* Elsewhere types of tile_types.py are multiplied as bytes (gemm_bytes.py), with activations of 8 bits and a scale per 32. Other
  quantised types are decoded and multiplied as bf16 where there are dot products of those, as float32 where there are none.

f32 and f16 weights are left to float32 (`can_multiply` is False), and so is bf16 without a tile unit.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...formats import TensorType
from ...quantize import decode
from ...repack import unpack as unpack_rows
from . import amx
from .activations import RUN, quantise
from .gemm_bytes import BLOCK, TILE_TOKENS, multiply_bytes
from .gemm_floats import STRETCH, has_dots, multiply_dots, multiply_expanded, multiply_tiles
from .lines import empty, scratch
from .tile_floats import STEP, panels_of, round_rows
from .tile_types import kind_of
from .tile_unpack import PANEL, unpack

ROWS = 2 * PANEL  # rows are multiplied in multiples of it: where a matrix is divided among threads
_CHUNK = 1 << 19  # codes unpacked at a time: they stay in the second-level cache
_SUMS = (8, 512, ROWS)  # pairs of panels, tokens and rows whose sums are kept until all columns are done: half a megabyte


class Tokens:
    """Activations float32 [n, columns], and what products need of them, made when first asked for and then shared by all
    matrices that multiply them."""

    def __init__(self, x: np.ndarray):
        self.x = np.ascontiguousarray(x, np.float32)
        self._offsets: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def rounded(self) -> np.ndarray:
        """As bf16, in blocks."""
        return round_rows(self.x)

    @cached_property
    def split(self) -> np.ndarray:
        """As sums of two bf16 numbers, in blocks."""
        return round_rows(self.x, 2)

    @cached_property
    def quantised(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes int8 [n, columns], scales float32 [n, columns / 32], sums int16 [n, columns / 16], n filled up with zeros."""
        n, columns = self.x.shape
        filled = -(-n // TILE_TOKENS) * TILE_TOKENS
        codes, scales = empty((filled, columns), np.int8), empty((filled, columns // BLOCK), np.float32)
        sums = empty((filled, columns // RUN), np.int16)
        done = quantise(self.x, BLOCK)
        for target, source in ((codes, done.codes), (scales, done.scales), (sums, done.sums)):
            target[:n], target[n:] = source, 0
        return codes, scales, sums

    def offsets(self, zero: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Per group of 16 or 32 columns: -zero * (sum of the codes), int32, and that sum times the block's scale, float32."""
        if (zero, group) not in self._offsets:
            self._offsets[zero, group] = self._new_offsets(zero, group)
        return self._offsets[zero, group]

    def _new_offsets(self, zero: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        _, scales, sums = self.quantised
        if group == BLOCK:
            sums = sums[:, ::2] + sums[:, 1::2]
        else:
            scales = np.repeat(scales, 2, axis=1)
        return sums.astype(np.int32) * np.int32(-zero), sums * scales


def can_multiply(stored: TensorType) -> bool:
    """Whether `multiply` takes a tensor stored so; the others are decoded to float32 and multiplied as that."""
    if stored.name in ("bf16", "bf16_r16"):
        return amx.permitted()
    if stored.is_float or not stored.is_known:
        return False
    return amx.permitted() or kind_of(stored.name) is not None or has_dots()


def prepare(stored: TensorType, tokens: Tokens) -> None:
    """Makes what `multiply` will need of the tokens: to be called before threads share them."""
    kind = kind_of(stored.name)
    if stored.is_float or stored.name == "bf16_r16":
        _ = tokens.split
    elif kind is None or amx.permitted():
        _ = tokens.rounded
    else:
        tokens.offsets(kind.zero, kind.group)


def rows_at_once(columns: int) -> int:
    """Rows that `multiply` had better be given at a time."""
    return max(1, _CHUNK // (columns * ROWS)) * ROWS


def multiply(q: np.ndarray, stored: TensorType, tokens: Tokens, out: np.ndarray, column: int) -> None:
    """Writes tokens times the rows q, uint8 [rows, row_bytes] and whole groups, to the columns of out from `column` on.

    out: float32 [n, all rows], C-contiguous. If the number of rows is no multiple of ROWS, they have to be the last ones.
    """
    columns, kind = tokens.x.shape[1], kind_of(stored.name)
    sums, stretch = scratch("sums", _SUMS, np.float32), scratch("stretch", (ROWS * STRETCH,), np.uint16)
    if stored.name in ("bf16", "bf16_r16"):
        if stored.base is not None and columns % STEP:
            q, _ = unpack_rows(q, stored.name, columns)
        elif stored.base is not None:
            multiply_tiles(_frozen(q).reshape(-1, columns // 2, PANEL, 2), tokens.split, sums, stretch, out, column)
            return
        multiply_tiles(panels_of(_frozen(q)), tokens.split, sums, stretch, out, column)
    elif kind is None:
        panels = panels_of(np.ascontiguousarray(decode(q, stored.name, columns)))
        if amx.permitted():
            multiply_tiles(panels, tokens.rounded, sums, stretch, out, column)
        else:
            multiply_dots(panels, tokens.rounded, sums, out, column)
    else:
        panels = unpack(q, stored.name, columns)
        weights = (panels.codes, panels.scales, panels.terms)
        if amx.permitted():
            multiply_expanded(*weights, panels.zero, panels.group, tokens.rounded, sums, stretch, out, column)
        else:
            codes, scales, _ = tokens.quantised
            offsets, totals = tokens.offsets(panels.zero, panels.group)
            multiply_bytes(None if panels.group == BLOCK else True, *weights, codes, scales, offsets, totals, sums, out, column)


def _frozen(q: np.ndarray) -> np.ndarray:
    """The bits of bf16 rows, not to be written: kernels then have one signature, whether they come from a file or not."""
    bits = np.ascontiguousarray(q).view(np.uint16).view()
    bits.flags.writeable = False
    return bits
