"""The iq1 types: levels -1, 0, 1 by eights from one grid, shifted by 1/8 up or down, and block scales of three or four bits.

iq1_s and iq1_m have a float16 scale per superblock of 256; iq1_s_r4 and iq1_m_r4 are encodings of their own, of four
interleaved rows with a float16 scale each (docs/formats/layouts.md and interleaved.md). The search is that of iq1_search.py,
with the weights of grid_weights.py; factors and spans of these are those of docs/formats/encoders.md (codebook i-quants).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....formats import TYPES
from ....formats.layouts import layout_of
from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ....simd.lanes import LANES
from ..block_packing import put_superblocks
from ..codec import Codec, ItemEncoder
from ..fields import BlockFields
from ..float_range import to_f16
from ..importance import importance_rows
from ..lane_packing import lane_parts
from ..row_decoder import row_decoder
from .codebooks import codebook, codes_to_grid_indices
from .grid_search import SUPERBLOCK, nibble_tables
from .grid_weights import prepare_superblock
from .iq1_search import SHIFT, ZERO_LEVELS, make_iq1_search

CODEBOOK = "iq1s"


def _make_encoder(block: int, shift_block: int) -> Any:
    search_superblock = make_iq1_search(block, shift_block)

    @kernel
    def encode_superblocks(
        x, importance, superblock, sigma2_span, sigma2_factor, norm_share, trial_scales, trial_divisors, base, step, max_code,
        ranks, grid_index, neighbours, tables_plus, tables_minus, grid_indices, signs, scales, d,
    ):  # fmt: skip
        """Encodes superblocks of `superblock` elements of x, float32 [rows, n].

        sigma2_span  elements over which the mean square in the weights is taken
        grid_indices uint16 [superblocks, superblock / 8], out
        signs        uint8 [superblocks, superblock / 8], out: 1 for a negative shift
        scales       uint8 [superblocks, superblock / block], out: scale codes
        d            float32 [superblocks], out

        The other arguments are those of search_superblock in iq1_search.py.
        """
        flat = x.reshape(-1)
        n = x.shape[1]
        w, normalised = np.empty(superblock, np.float32), np.empty(superblock, np.float32)
        for s in range(flat.size // superblock):
            amax = prepare_superblock(
                flat, importance, s * superblock, n, superblock, sigma2_span, sigma2_factor, normalised, w
            )
            if amax == 0:
                grid_indices[s, :] = ZERO_LEVELS
                codes_to_grid_indices(grid_indices[s], ranks, grid_index)
                signs[s, :], scales[s, :], d[s] = 0, 0, 0
                continue
            scale = search_superblock(
                normalised, w, norm_share, trial_scales, trial_divisors, base, step, max_code, ranks, neighbours, tables_plus,
                tables_minus, grid_indices[s], signs[s], scales[s],
            )  # fmt: skip
            d[s] = scale * amax
            codes_to_grid_indices(grid_indices[s], ranks, grid_index)

    return encode_superblocks


_encode_iq1_s, _encode_iq1_m = _make_encoder(32, 32), _make_encoder(16, 8)


# Kernels with variables of an enclosing function are not cached on disk; these, which call them, are.
@kernel
def _encode_iq1_s_kernel(*arguments):
    _encode_iq1_s(*arguments)


@kernel
def _encode_iq1_m_kernel(*arguments):
    _encode_iq1_m(*arguments)


# For GPUs: superblocks of 256 only, rows would be too few threads.
_ITEMS = WorkItems(("x",), ("out",), shared_rows=("importance",))


@kernel(items=_ITEMS)
def _iq1_s_superblocks(x, importance, search, per_flag, code_parts, flag_parts, scale_parts, d_parts, out):
    """x float32 [rows, n] -> out uint8 [superblocks, bytes]. search: the arguments of the encoder from superblock on."""
    count = out.shape[0]
    grid_indices, signs = np.empty((count, SUPERBLOCK // 8), np.uint16), np.empty((count, SUPERBLOCK // 8), np.uint8)
    scales, d = np.empty((count, SUPERBLOCK // 32), np.uint8), np.empty(count, np.float32)
    _encode_iq1_s(x, importance, *search, grid_indices, signs, scales, d)
    put_superblocks(grid_indices, signs, scales, d, per_flag, code_parts, flag_parts, scale_parts, d_parts, out)


@kernel(items=_ITEMS)
def _iq1_m_superblocks(x, importance, search, per_flag, code_parts, flag_parts, scale_parts, d_parts, out):
    count = out.shape[0]
    grid_indices, signs = np.empty((count, SUPERBLOCK // 8), np.uint16), np.empty((count, SUPERBLOCK // 8), np.uint8)
    scales, d = np.empty((count, SUPERBLOCK // 16), np.uint8), np.empty(count, np.float32)
    _encode_iq1_m(x, importance, *search, grid_indices, signs, scales, d)
    put_superblocks(grid_indices, signs, scales, d, per_flag, code_parts, flag_parts, scale_parts, d_parts, out)


# Trial scales of a block with an amax of 1.
_TRIAL_SCALES = (1 / (0.7 * 1.16 ** np.arange(LANES))).astype(np.float32)


@dataclass(frozen=True)
class _Iq1Type:
    """An iq1 type and its encoder.

    block           elements per scale code
    encode_kernel   kernel for that block size
    sigma2_factor, sigma2_span  of the weights
    norm_share      see grid_search.norm_corrected_scale
    base, step, max_code  block scales are d * (base + step * code), code 0 ... max_code
    """

    name: str
    block: int
    encode_kernel: Callable[..., None]
    sigma2_factor: float
    sigma2_span: int
    norm_share: float
    base: int
    step: int
    max_code: int

    @property
    def has_row_scale(self) -> bool:
        return TYPES[self.name].row_meta > 0

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        superblock = x.shape[1] if self.has_row_scale else SUPERBLOCK
        superblocks = x.size // superblock
        grid_indices, signs = (
            np.empty((superblocks, superblock // 8), np.uint16),
            np.empty((superblocks, superblock // 8), np.uint8),
        )
        scales = np.empty((superblocks, superblock // self.block), np.uint8)
        d = np.empty(superblocks, np.float32)
        self.encode_kernel(x, importance_rows(importance), *self._search(superblock), grid_indices, signs, scales, d)
        fields = BlockFields.of(self.name)
        per_flag = signs.shape[1] * fields.layout.block // superblock // fields.layout.bit_arrays()["flags"].shape[1]
        numbers = {"codes": grid_indices, "scales": scales, "flags": signs[:, ::per_flag].copy(), "d": to_f16(d)}
        return fields.pack(*x.shape, **numbers)

    def _search(self, superblock: int) -> tuple[Any, ...]:
        """The arguments of the kernel from superblock to tables_minus."""
        book = codebook(CODEBOOK)
        max_scale = self.base + self.step * self.max_code
        trial_divisors = (max_scale * 0.85 * 1.06 ** np.arange(LANES)).astype(np.float32)
        return (
            superblock, self.sigma2_span, np.float32(self.sigma2_factor), np.float32(self.norm_share), _TRIAL_SCALES,
            trial_divisors, np.float32(self.base), np.float32(self.step), np.float32(self.max_code), book.ranks,
            book.grid_index, book.neighbours, nibble_tables(book, float(SHIFT)), nibble_tables(book, -float(SHIFT)),
        )  # fmt: skip

    def encode_items(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        """`Codec.items` of a type with a scale for each superblock."""
        stored, flags = TYPES[self.name], layout_of(self.name).flags
        assert flags is not None
        out = np.empty((len(x), stored.row_bytes(x.shape[1])), np.uint8)
        parts = [lane_parts(self.name, name) for name in ("codes", "flags", "scales", "d")]
        encode = _iq1_s_superblocks if self.block == 32 else _iq1_m_superblocks
        per_flag = SUPERBLOCK // 8 // flags.shape[1]
        encode(x, importance_rows(importance), self._search(SUPERBLOCK), per_flag, *parts, out.reshape(-1, stored.block_bytes))
        return out


_TYPES = (
    _Iq1Type("iq1_s", 32, _encode_iq1_s_kernel, 2.0, 256, 1.0, 1, 2, 7),
    _Iq1Type("iq1_m", 16, _encode_iq1_m_kernel, 1.5, 32, 1.0, 1, 2, 7),
    _Iq1Type("iq1_s_r4", 32, _encode_iq1_s_kernel, 1.5, 32, 0.8, 1, 2, 7),
    _Iq1Type("iq1_m_r4", 16, _encode_iq1_m_kernel, 1.5, 32, 0.7, 0, 1, 15),
)  # fmt: skip
CODECS: dict[str, Codec] = {
    t.name: Codec(t.encode, row_decoder(t.name), items=None if t.has_row_scale else ItemEncoder(t.encode_items)) for t in _TYPES
}
