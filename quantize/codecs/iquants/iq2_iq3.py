"""The iq2 and iq3 types: magnitudes from a grid, separate signs, a scale code for 16 or 32 weights and a float16 scale for 256.

Layouts: docs/formats/layouts.md. The search is that of grid_search.py, with the weights of grid_weights.py; unlike llama.cpp's
encoders, these all work without importance too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....formats import TYPES
from ....formats.layouts import layout_of
from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ....simd.lanes import LANES, load, mask_bits, mask_from_bits, reduce_min, select, splat, store
from ..block_packing import put_superblocks
from ..codec import Codec, ItemEncoder
from ..fields import BlockFields
from ..float_range import to_f16
from ..importance import importance_rows
from ..lane_packing import lane_parts
from ..row_decoder import row_decoder
from .codebooks import codebook, codes_to_grid_indices
from .grid_search import SUPERBLOCK, make_grid_search, nibble_tables
from .grid_weights import prepare_superblock


# The eight signs (bit set: negative) that a code of seven bits stands for: the eighth makes their parity even.
@kernel
def _split_signs(x, w, even_signs, signs):
    """Replaces x, float32, by its magnitudes and writes the signs (bit set: negative), uint8 [x.size / 8].

    even_signs: the number of negatives in a group of eight is made even by flipping the sign of the element of least w * |x|,
    whose magnitude becomes negative.
    """
    for j in range(0, x.size, LANES):
        magnitude = abs(load(x, j))
        bits = mask_bits(load(x, j) < 0)
        if even_signs:
            loss = load(w, j) * magnitude
            for half in range(2):
                group = 255 << (8 * half)
                parity = bits & group
                parity ^= parity >> 4
                parity ^= parity >> 2
                parity ^= parity >> 1
                if (parity >> (8 * half)) & 1:
                    in_group = mask_from_bits(group)
                    least_loss = reduce_min(select(in_group, loss, splat(np.inf)))
                    flipped = mask_bits(in_group & (loss == least_loss))
                    flipped &= -flipped
                    bits ^= flipped
                    magnitude = select(mask_from_bits(flipped), -magnitude, magnitude)
        store(x, j, magnitude)
        signs[j // 8], signs[j // 8 + 1] = bits & 255, bits >> 8


def _make_encoder(size: int, block: int) -> Any:
    search_superblock = make_grid_search(size, block)

    @kernel
    def encode_blocks(
        x, importance, sigma2_factor, even_signs, norm_share, trial_scales, trial_factors, trial_divisors, ranks, grid_index,
        neighbours, tables, bounds, grid_indices, signs, scales, d,
    ):  # fmt: skip
        """Encodes superblocks of x, float32 [rows, n].

        grid_indices  uint16 [superblocks, groups], out
        signs         uint8 [superblocks, 32], out: bit set for a negative element
        scales        uint8 [superblocks, blocks], out: scale codes
        d             float32 [superblocks], out

        The other arguments are those of search_superblock in grid_search.py.
        """
        flat = x.reshape(-1)
        n = x.shape[1]
        w, magnitudes = np.empty(SUPERBLOCK, np.float32), np.empty(SUPERBLOCK, np.float32)
        for s in range(flat.size // SUPERBLOCK):
            amax = prepare_superblock(flat, importance, s * SUPERBLOCK, n, SUPERBLOCK, SUPERBLOCK, sigma2_factor, magnitudes, w)
            if amax == 0:
                grid_indices[s, :], signs[s, :], scales[s, :], d[s] = 0, 0, 0, 0
                continue
            _split_signs(magnitudes, w, even_signs, signs[s])
            scale = search_superblock(
                magnitudes, w, norm_share, trial_scales, trial_factors, trial_divisors, ranks, grid_index, neighbours, tables,
                bounds, grid_indices[s], scales[s],
            )  # fmt: skip
            d[s] = scale * amax
            codes_to_grid_indices(grid_indices[s], ranks, grid_index)

    return encode_blocks


_encode_8_16, _encode_8_32, _encode_4_32 = _make_encoder(8, 16), _make_encoder(8, 32), _make_encoder(4, 32)


# Kernels with variables of an enclosing function are not cached on disk; these, which call them, are.
@kernel
def _encode_8_16_kernel(*arguments):
    _encode_8_16(*arguments)


@kernel
def _encode_8_32_kernel(*arguments):
    _encode_8_32(*arguments)


@kernel
def _encode_4_32_kernel(*arguments):
    _encode_4_32(*arguments)


_ITEMS = WorkItems(("x",), ("out",), shared_rows=("importance",))


@kernel(items=_ITEMS)
def _pack_8_16(x, importance, search, code_parts, sign_parts, scale_parts, d_parts, out):
    """x float32 [rows, n] -> out uint8 [superblocks, bytes]. search: the arguments of the encoder from sigma2_factor on."""
    count = out.shape[0]
    grid_indices, signs = np.empty((count, SUPERBLOCK // 8), np.uint16), np.empty((count, SUPERBLOCK // 8), np.uint8)
    scales, d = np.empty((count, SUPERBLOCK // 16), np.uint8), np.empty(count, np.float32)
    _encode_8_16(x, importance, *search, grid_indices, signs, scales, d)
    put_superblocks(grid_indices, signs, scales, d, 1, code_parts, sign_parts, scale_parts, d_parts, out)


@kernel(items=_ITEMS)
def _pack_8_32(x, importance, search, code_parts, sign_parts, scale_parts, d_parts, out):
    count = out.shape[0]
    grid_indices, signs = np.empty((count, SUPERBLOCK // 8), np.uint16), np.empty((count, SUPERBLOCK // 8), np.uint8)
    scales, d = np.empty((count, SUPERBLOCK // 32), np.uint8), np.empty(count, np.float32)
    _encode_8_32(x, importance, *search, grid_indices, signs, scales, d)
    put_superblocks(grid_indices, signs, scales, d, 1, code_parts, sign_parts, scale_parts, d_parts, out)


@kernel(items=_ITEMS)
def _pack_4_32(x, importance, search, code_parts, sign_parts, scale_parts, d_parts, out):
    count = out.shape[0]
    grid_indices, signs = np.empty((count, SUPERBLOCK // 4), np.uint16), np.empty((count, SUPERBLOCK // 8), np.uint8)
    scales, d = np.empty((count, SUPERBLOCK // 32), np.uint8), np.empty(count, np.float32)
    _encode_4_32(x, importance, *search, grid_indices, signs, scales, d)
    put_superblocks(grid_indices, signs, scales, d, 1, code_parts, sign_parts, scale_parts, d_parts, out)


# By elements of a group and of a block: for the processor, and for work items.
_ENCODERS = {
    (8, 16): (_encode_8_16_kernel, _pack_8_16),
    (8, 32): (_encode_8_32_kernel, _pack_8_32),
    (4, 32): (_encode_4_32_kernel, _pack_4_32),
}


def _trial_scales(lowest: float, ratio: float) -> np.ndarray:
    """Trial scales for a block with an amax of 1: 1 / `lowest` and smaller ones."""
    return (1 / (lowest * ratio ** np.arange(LANES))).astype(np.float32)


# Arguments of search_superblock, two of them by the size of a group. The largest scale of a superblock, of code 15, is 31 d.
_TRIAL_SCALES = {8: _trial_scales(3.6, 1.13), 4: _trial_scales(9, 1.1)}
_TRIAL_FACTORS = {8: np.array([1], np.float32), 4: np.array([0.96, 1.03], np.float32)}
_TRIAL_DIVISORS = (24 + np.arange(LANES)).astype(np.float32)


@dataclass(frozen=True)
class _GridType:
    """An iq2 or iq3 type.

    codebook       name of its grid
    block          elements per scale code
    even_signs     whether the eighth sign of a group is implied by even parity
    sigma2_factor  of mean(x^2) in the weights
    norm_share     see grid_search.norm_corrected_scale
    """

    name: str
    codebook: str
    block: int
    even_signs: bool
    sigma2_factor: float
    norm_share: float

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        book = codebook(self.codebook)
        superblocks = x.size // SUPERBLOCK
        grid_indices = np.empty((superblocks, SUPERBLOCK // book.size), np.uint16)
        signs = np.empty((superblocks, SUPERBLOCK // 8), np.uint8)
        scales = np.empty((superblocks, SUPERBLOCK // self.block), np.uint8)
        d = np.empty(superblocks, np.float32)
        encode = _ENCODERS[book.size, self.block][0]
        encode(x, importance_rows(importance), *self._search(), grid_indices, signs, scales, d)
        fields, layout = BlockFields.of(self.name), layout_of(self.name)
        q = fields.pack(*x.shape, codes=grid_indices, scales=scales, d=to_f16(d))
        if self.even_signs:
            fields.write(q, "sign_codes", signs & 127)
        else:  # a bit each, one after the other
            assert layout.signs is not None
            first = int(layout.signs[0, 0, 0]) // 8
            q.reshape(superblocks, -1)[:, first : first + signs.shape[1]] = signs
        return q

    def _search(self) -> tuple[Any, ...]:
        """The arguments of the kernel from sigma2_factor to bounds."""
        book = codebook(self.codebook)
        bounds = ((book.levels[1:] + book.levels[:-1]) / 2)[[0, 1, -1]]
        return (
            np.float32(self.sigma2_factor), self.even_signs, np.float32(self.norm_share), _TRIAL_SCALES[book.size],
            _TRIAL_FACTORS[book.size], _TRIAL_DIVISORS, book.ranks, book.grid_index, book.neighbours, nibble_tables(book),
            bounds,
        )  # fmt: skip

    def encode_items(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        """`Codec.items`."""
        stored = TYPES[self.name]
        out = np.empty((len(x), stored.row_bytes(x.shape[1])), np.uint8)
        parts = [lane_parts(self.name, "codes"), self._sign_parts(), *(lane_parts(self.name, name) for name in ("scales", "d"))]
        encode = _ENCODERS[codebook(self.codebook).size, self.block][1]
        encode(x, importance_rows(importance), self._search(), *parts, out.reshape(-1, stored.block_bytes))
        return out

    def _sign_parts(self) -> np.ndarray:
        """As `lane_parts`, of the signs of eight weights."""
        layout, eights = layout_of(self.name), np.arange(SUPERBLOCK // 8)
        if self.even_signs:
            return lane_parts(self.name, "sign_codes")
        assert layout.signs is not None
        zeros = np.zeros_like(eights)
        return np.stack([eights, int(layout.signs[0, 0, 0]) // 8 + eights, zeros, zeros + 255, zeros], axis=1)


_TYPES = (
    _GridType("iq2_xxs", "iq2xxs", 32, True, 1.0, 0.5),
    _GridType("iq2_xs", "iq2xs", 16, True, 1.0, 0.5),
    _GridType("iq2_s", "iq2s", 16, False, 2.0, 0.0),
    _GridType("iq3_xxs", "iq3xxs", 32, True, 2.0, 0.0),
    _GridType("iq3_s", "iq3s", 32, False, 2.0, 0.0),
)
CODECS: dict[str, Codec] = {t.name: Codec(t.encode, row_decoder(t.name), items=ItemEncoder(t.encode_items)) for t in _TYPES}
