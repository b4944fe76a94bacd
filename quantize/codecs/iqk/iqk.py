"""Codecs of the IQK types: codes into non-uniform tables, a scale and a table flag for every 16 (K) or 32 weights (KS).

Layouts are those of spec part B, the encoders' searches those of D.4 and D.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....formats import TYPES
from ....formats.layouts import BlockLayout, layout_of
from ..float_range import normalise_importance, normalise_rows, to_f16
from ..importance import guard_importance
from ..registry import Codec, empty_rows
from .bit_planes import decode_rows, pack_codes, planes_of, planes_to_read
from .fit import MAGNITUDE, ODD, SEARCHED, SIGNED, fit_units
from .headers import FiveBit, FiveBitSwapped, FourBit, Header, OddByte, OddWithSign, SignedByte, SixBit
from .scale_search import DEAD, ORDINARY_EXPONENTS, trial_steps
from .segment_search import sorting_network
from .value_tables import choices, midpoints, needs_three, value_table

_SUPERBLOCK = 256
_NO_PLANE = ((0, 0), 0)


def _padded(table: np.ndarray, value: float) -> np.ndarray:
    """float32 [2, any] -> float32 [2, 16, 32 or 64]."""
    missing = -table.shape[1] % 16
    return np.pad(table, ((0, 0), (0, missing)), constant_values=value)


@dataclass(frozen=True)
class _Type:
    """What encoder and decoder have to know about a type.

    header      where scale codes and flags lie
    factor      of the mean square in the weights; share: of that, without importance
    trials      (ntry, step) of the scale search
    scheme      how block scales become integers, with the divisor, lowest and highest number of it
    again       whether the search ends with one more quantisation
    boost       factor on the refitted scale
    skip_zero   whether blocks of scale 0 keep code 0
    blank       whether units of weights that are all 0 are all zero bytes
    paired      whether the last sums take elements two by two
    """

    name: str
    header: type[Header]
    factor: float
    share: float
    trials: tuple[int, int]
    scheme: tuple[int, int, int, int]
    again: bool = False
    boost: float = 1.0
    skip_zero: bool = False
    blank: bool = True
    paired: bool = False

    @property
    def by_row(self) -> bool:
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
    def decoded(self) -> np.ndarray | None:
        """What codes decode to, where that is not exactly the table."""
        return None if self.layout.decoded is None else value_table(self.layout.decoded, self.layout.shifts)

    @cached_property
    def two_planes(self) -> tuple:
        return (*planes_of(self.layout.codes[0]), _NO_PLANE)[:2]

    @cached_property
    def padded(self) -> np.ndarray:
        """The table with at least 16 entries."""
        return _padded(self.table, 0)

    @cached_property
    def midpoints(self) -> np.ndarray:
        """Of the padded table's entries; infinity where an entry is not used."""
        return _padded(midpoints(self.table), np.inf)

    @cached_property
    def search(self) -> tuple:
        """What `fit_units` calls search."""
        ntry, step = self.trials
        nearby = choices(self.table, ntry * step / float(-self.table[1, 0]))
        steps, trials = trial_steps(ntry, step), 2 * ntry + 1 if ntry else 0
        return steps, trials, self.table[:, 0].copy(), nearby, needs_three(nearby), sorting_network(self.block)

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        v = normalise_importance(guard_importance(x, importance, self.block))
        unit = n if self.by_row else _SUPERBLOCK
        x, exponents = normalise_rows(x.reshape(-1, unit), ORDINARY_EXPONENTS, DEAD)
        codes = np.empty(x.shape, np.uint8)
        levels = np.empty((len(x), unit // self.block), np.float32)
        flags = np.empty(levels.shape, np.uint8)
        d = np.empty(len(x), np.float32)
        kind, *numbers = self.scheme
        fit_units(
            x, v.reshape(-1, unit), self.block, np.float32(self.factor), np.float32(self.share), self.search, self.midpoints,
            self.padded, (kind, *map(np.float32, numbers)), self.again, np.float32(self.boost), self.skip_zero, self.paired,
            codes, flags, levels, d,
        )  # fmt: skip
        return self._pack(codes.reshape(-1, _SUPERBLOCK), levels, flags, np.ldexp(d, exponents), rows)

    def _pack(self, codes: np.ndarray, levels: np.ndarray, flags: np.ndarray, d: np.ndarray, rows: int) -> np.ndarray:
        kind = TYPES[self.name]
        blocks = np.zeros((len(codes), kind.block_bytes), np.uint8)
        self.header.write(blocks, levels.reshape(len(blocks), -1), flags.reshape(len(blocks), -1))
        pack_codes(codes, self.two_planes, blocks)
        if self.blank:
            blocks.reshape(len(d), -1)[d == 0] = 0
        if not self.by_row:
            if self.blank:
                d = np.where(d == 0, np.float32(0), d)  # not -0
            blocks[:, :2] = to_f16(d)[:, None].view(np.uint8)
            return blocks.reshape(rows, -1)
        scale = (d.astype("<f4") if kind.row_meta == 4 else to_f16(d))[:, None].view(np.uint8)
        return np.concatenate([scale, blocks.reshape(rows, -1)], axis=1)

    @cached_property
    def _layout(self) -> tuple:
        """What `decode_rows` takes between the rows and the output."""
        kind = TYPES[self.name]
        smooth = self.padded if self.decoded is None else self.decoded
        table = np.zeros(smooth.size + 16, np.int8)  # sixteen more, because two registers of it are read at a time
        if self.decoded is None:
            table[:-16] = smooth.reshape(-1)
        places = kind.block_bytes, self.header.number, planes_to_read(self.two_planes), self.block.bit_length() - 1
        return kind.row_meta, *places, smooth.shape[1], table, smooth.reshape(-1)

    def decode(self, q: np.ndarray, n: int) -> np.ndarray:
        out = empty_rows(len(q), n)
        decode_rows(q, *self._layout, out)
        return out


_TYPES = (
    _Type("iq2_k", FourBit, 1.5, 0.25, (0, 0), (SEARCHED, 8, -8, 7), boost=1.03, skip_zero=True),
    _Type("iq3_k", OddWithSign, 1.5, 0.25, (3, 2), (MAGNITUDE, 31, 0, 15), again=True, boost=1.01,
          skip_zero=True),
    _Type("iq4_k", SixBit, 2, 0, (7, 1), (SIGNED, 32, -32, 31), blank=False),
    _Type("iq5_k", SixBit, 2, 0.25, (5, 1), (SIGNED, 32, -32, 31), again=True, skip_zero=True),
    _Type("iq6_k", SignedByte, 2, 0.25, (5, 1), (SIGNED, 127, -127, 127), again=True,
          skip_zero=True),
    _Type("iq2_ks", FiveBitSwapped, 1.5, 0.25, (0, 0), (SEARCHED, 16, -16, 15)),
    _Type("iq3_ks", FiveBit, 2, 0, (5, 1), (SIGNED, 16, -16, 15)),
    _Type("iq4_ks", OddByte, 2, 0, (7, 1), (ODD, 127, 0, 127), paired=True),
    _Type("iq5_ks", OddByte, 2, 0, (5, 1), (ODD, 127, 0, 127)),
)  # fmt: skip

CODECS = {kind.name: Codec(kind.encode, kind.decode) for kind in _TYPES}
