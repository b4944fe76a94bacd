"""Codecs of the K and KS types of ik_llama.cpp.

They have codes of non-uniform tables, with a scale and a table flag per 16 (K) or 32 weights (KS). Layouts:
docs/formats/layouts.md; searches: encoders.md (the IQK search; iq2_k and iq2_ks).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....formats import TYPES
from ....formats.layouts import BlockLayout, layout_of
from ....formats.layouts.description import SIGNED_BYTES
from ....simd.team import TaskKernel
from ..block_packing import NO_PARTS
from ..codec import Codec, ItemEncoder
from ..fields import BlockFields
from ..float_range import normalise_importance, normalise_rows, to_f16
from ..importance import guard_importance, importance_rows
from ..lane_packing import lane_parts
from ..row_decoder import row_decoder
from .boundary_search import search_of_boundaries, sorting_network
from .fit import MAGNITUDE, ODD, SEARCHED, SIGNED, fit_rows
from .superblocks import encode_superblocks, encode_superblocks_by_boundaries
from .table_search import MIN_AMAX, ORDINARY_EXPONENTS, search_of_three, trial_offsets
from .value_tables import candidate_values, midpoints, needs_three_candidates, value_table

_SUPERBLOCK = 256


def _padded(table: np.ndarray, value: float) -> np.ndarray:
    """float32 [2, any] -> float32 [2, 16, 32 or 64]."""
    missing = -table.shape[1] % 16
    return np.pad(table, ((0, 0), (0, missing)), constant_values=value)


@dataclass(frozen=True)
class IqkType:
    """What encoder and decoder need to know about a type in addition to its layout.

    sigma2_factor  of the mean square in the weights; sigma2_share: of that, without importance
    trials         (ntry, step) of the scale search
    scheme         how block scales become integers (SIGNED, MAGNITUDE, ODD, SEARCHED of fit.py), with divisor, smallest and
                   largest integer
    requantise     whether the search ends with one more quantisation and refit of each block
    scale_factor   factor on the refitted scale d
    zero_codes     whether blocks of scale 0 get code 0
    zero_bytes     whether a row (K types: superblock) of zeros is all zero bytes
    pairwise_sums  whether the sums of the final refit add elements in pairs
    """

    name: str
    sigma2_factor: float
    sigma2_share: float
    trials: tuple[int, int]
    scheme: tuple[int, int, int, int]
    requantise: bool = False
    scale_factor: float = 1.0
    zero_codes: bool = False
    zero_bytes: bool = True
    pairwise_sums: bool = False

    @property
    def has_row_scale(self) -> bool:
        return TYPES[self.name].row_meta > 0

    @cached_property
    def layout(self) -> BlockLayout:
        return layout_of(self.name)

    @property
    def block(self) -> int:
        """Weights that share a scale code and a table flag."""
        return self.layout.group

    @cached_property
    def table(self) -> np.ndarray:
        """float32 [2, entries]: the values, and their shifted copy."""
        return value_table(self.layout.values[:, 0], self.layout.shifts)

    @cached_property
    def padded(self) -> np.ndarray:
        """The table with at least 16 entries."""
        return _padded(self.table, 0)

    @cached_property
    def midpoints(self) -> np.ndarray:
        """Midpoints between the padded table's entries; infinity where an entry is not used."""
        return _padded(midpoints(self.table), np.inf)

    @cached_property
    def search(self) -> tuple:
        """The argument `search` of `fit_rows`, without the address."""
        ntry, step = self.trials
        candidates = candidate_values(self.table, ntry * step / float(-self.table[1, 0]))
        offsets, trial_count = trial_offsets(ntry, step), 2 * ntry + 1 if ntry else 0
        return (
            offsets,
            trial_count,
            self.table[:, 0].copy(),
            candidates,
            needs_three_candidates(candidates),
            sorting_network(self.block),
        )

    @property
    def search_part(self) -> TaskKernel | None:
        """The search, where it is not that for two candidates."""
        if not self.search[1]:
            return search_of_boundaries
        return search_of_three if self.search[4] else None

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        qw = normalise_importance(guard_importance(x, importance, self.block))
        row_size = n if self.has_row_scale else _SUPERBLOCK
        x, exponents = normalise_rows(x.reshape(-1, row_size), ORDINARY_EXPONENTS, MIN_AMAX)
        codes = np.empty(x.shape, np.uint8)
        int_scales = np.empty((len(x), row_size // self.block), np.float32)
        flags = np.empty(int_scales.shape, np.uint8)
        d = np.empty(len(x), np.float32)
        part = self.search_part
        options = self._fit_options(0 if part is None else part.address)
        fit_rows(x, qw.reshape(-1, row_size), *options, codes, flags, int_scales, d)
        return self._pack(codes, int_scales, flags, np.ldexp(d, exponents), rows)

    @property
    def items(self) -> ItemEncoder | None:
        """`Codec.items`: of the K types."""
        scaled = _SUPERBLOCK, ORDINARY_EXPONENTS
        return None if self.has_row_scale else ItemEncoder(self._encode_items, self.block, scaled, normalise_importance)

    def _encode_items(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        out = np.empty((len(x), TYPES[self.name].row_bytes(x.shape[1])), np.uint8)
        qw = importance_rows(importance)
        layout = self.layout
        levels = layout.levels
        assert levels is not None
        is_bytes = np.array_equal(levels, SIGNED_BYTES)
        line = (0, 0) if is_bytes else (int(levels[0]), int(levels[1] - levels[0]))
        parts = [
            lane_parts(self.name, name) if getattr(layout, name) is not None else NO_PARTS
            for name in ("codes", "flags", "scales", "signs", "d")
        ]
        encode = encode_superblocks if self.search[1] else encode_superblocks_by_boundaries
        blocks = out.reshape(-1, TYPES[self.name].block_bytes)
        encode(
            x.reshape(-1, _SUPERBLOCK),
            qw.reshape(-1, _SUPERBLOCK),
            *self._fit_options(0),
            line,
            self.zero_bytes,
            *parts,
            blocks,
        )
        return out

    def _fit_options(self, function: int) -> tuple[Any, ...]:
        """The arguments of `fit_rows` from block to pairwise_sums. function: the address of `search_part`, or 0."""
        method, *numbers = self.scheme
        return (
            self.block, np.float32(self.sigma2_factor), np.float32(self.sigma2_share), (*self.search, function), self.midpoints,
            self.padded, (method, *map(np.float32, numbers)), self.requantise, np.float32(self.scale_factor), self.zero_codes,
            self.pairwise_sums,
        )  # fmt: skip

    def _pack(self, codes: np.ndarray, int_scales: np.ndarray, flags: np.ndarray, d: np.ndarray, rows: int) -> np.ndarray:
        fields, meta = BlockFields.of(self.name), TYPES[self.name].row_meta
        q = fields.pack(rows, codes.size // rows, codes=codes, flags=flags, **scale_numbers(self.layout, int_scales))
        if self.zero_bytes:
            (q[:, meta:] if self.has_row_scale else q.reshape(len(d), -1))[d == 0] = 0
            d = d if self.has_row_scale else np.where(d == 0, np.float32(0), d)  # not -0
        fields.write_scale(q, d if meta == 4 else to_f16(d))
        return q


def scale_numbers(layout: BlockLayout, int_scales: np.ndarray) -> dict[str, np.ndarray]:
    """Integer block scales, float32, as the numbers of the fields `scales` and, if the type has it, `signs`."""
    assert layout.levels is not None
    if np.array_equal(layout.levels, SIGNED_BYTES):
        return {"scales": int_scales.astype(np.int8).view(np.uint8)}
    signs = {} if layout.signs is None else {"signs": (int_scales < 0).astype(np.uint8)}
    levels = int_scales if layout.signs is None else np.abs(int_scales)
    first, step = int(layout.levels[0]), int(layout.levels[1] - layout.levels[0])
    return {"scales": (np.maximum(levels - first, 0).astype(np.uint8) // np.uint8(step)), **signs}


_TYPES = (
    IqkType("iq2_k", 1.5, 0.25, (0, 0), (SEARCHED, 8, -8, 7), scale_factor=1.03, zero_codes=True),
    IqkType("iq3_k", 1.5, 0.25, (3, 2), (MAGNITUDE, 31, 0, 15), requantise=True, scale_factor=1.01,
          zero_codes=True),
    IqkType("iq4_k", 2, 0, (7, 1), (SIGNED, 32, -32, 31), zero_bytes=False),
    IqkType("iq5_k", 2, 0.25, (5, 1), (SIGNED, 32, -32, 31), requantise=True, zero_codes=True),
    IqkType("iq6_k", 2, 0.25, (5, 1), (SIGNED, 127, -127, 127), requantise=True,
          zero_codes=True),
    IqkType("iq2_ks", 1.5, 0.25, (0, 0), (SEARCHED, 16, -16, 15)),
    IqkType("iq3_ks", 2, 0, (5, 1), (SIGNED, 16, -16, 15)),
    IqkType("iq4_ks", 2, 0, (7, 1), (ODD, 127, 0, 127), pairwise_sums=True),
    IqkType("iq5_ks", 2, 0, (5, 1), (ODD, 127, 0, 127)),
)  # fmt: skip

CODECS = {t.name: Codec(t.encode, row_decoder(t.name), items=t.items) for t in _TYPES}
