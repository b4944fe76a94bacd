"""Codecs of the trellis types iq1_kt, iq2_kt, iq3_kt and iq4_kt: groups of weights are vectors of a generated codebook.

A row has one float32 scale, every 32 weights a code for a factor on it, every 8 (or 4) weights the index of a vector
(docs/formats/layouts.md). codebook.py makes the vectors, fit.py chooses them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ....data_classes import dataclass
from ....formats.layouts.tables import IQ4_VALUES, Trellis
from ..codec import Codec
from ..fields import BlockFields
from ..float_range import normalise_importance, normalise_rows
from ..importance import importance_rows
from ..row_decoder import row_decoder
from .codebook import TrellisCodebook, TrellisTree, join_trees, trellis_codebook
from .fit import NO_VARIANT, TrellisFit, TrellisSearch, fit_rows

_ORDINARY_EXPONENTS = (-12, 8)  # binary exponents of rows that are not scaled; see normalise_rows
_FIRST_STATE = Trellis.first  # the start state of code 0
_SECOND_STATE = _FIRST_STATE + (1 << 15)  # of iq4_kt's second codebook, which the highest bit of a code chooses


def _geometric_sequence(largest: float, count: int) -> np.ndarray:
    """float32 [count], a geometric sequence from 1 / largest to largest."""
    return np.exp(np.linspace(-np.log(largest), np.log(largest), count)).astype(np.float32)


def _trial_factors(centers: int, center_step: float, tries: int = 1, try_step: float = 0) -> np.ndarray:
    """float32 [centers, tries]: factors on a scale, of tries around centers; the steps are differences of logarithms."""
    logarithms = center_step * (np.arange(centers) - (centers - 1) / 2), try_step * (np.arange(tries) - (tries - 1) / 2)
    return np.exp(np.add.outer(*logarithms)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class TrellisType:
    """What encoder and decoder need to know about a type.

    bits, size     of the codebook's indices; elements of a group
    states         start states of the codebooks; absolute: whether these have magnitudes, with sign bits in a plane at byte 68
    multiples      float32 [codes]: factor on the row's scale for each code of a block
    variants       codes tried for a block, int [variants, count]: of each variant (sign and codebook) by rising magnitude
    largest_range, trial_factors, heavy_trial_factors, refine_factors, limit_factor, distance_polynomial, prediction_factor
                   of the search, see `TrellisSearch`; tuned by error and time on rows of several distributions
    scale_factor   on the fitted scale: it compensates for the norm that least squares take away
    """

    name: str
    bits: int
    size: int
    states: tuple[int, ...]
    absolute: bool
    multiples: np.ndarray
    variants: np.ndarray
    largest_range: tuple[float, float]
    trial_factors: np.ndarray
    heavy_trial_factors: np.ndarray
    refine_factors: np.ndarray
    limit_factor: float
    distance_polynomial: tuple[float, ...]
    prediction_factor: float
    scale_factor: float = 1.0

    @cached_property
    def codebooks(self) -> list[TrellisCodebook]:
        return [trellis_codebook(self.bits, self.size, state, self.absolute) for state in self.states]

    @property
    def zero_code(self) -> int | None:
        """The code of the multiple 0, if there is one."""
        codes = np.flatnonzero(self.multiples == 0)
        return int(codes[0]) if codes.size else None

    @cached_property
    def tree(self) -> TrellisTree:
        return join_trees(self.codebooks, self.limit_factor, self.distance_polynomial)

    @cached_property
    def search(self) -> TrellisSearch:
        codebooks = self.codebooks
        multiples = np.abs(self.multiples[self.variants])
        return TrellisSearch(
            size=self.size,
            tree=self.tree,
            values=np.stack([each.values for each in codebooks]),
            orders=np.stack([each.order for each in codebooks]),
            multiples=multiples,
            signs=np.sign(self.multiples[self.variants[:, 0]]),
            codebooks=np.arange(len(self.variants)) // (len(self.variants) // len(codebooks)),
            magnitudes=np.unique(multiples),
            lowest=np.float32(self.largest_range[0]),
            highest=np.float32(self.largest_range[1]),
            trial_factors=self.trial_factors,
            heavy_trial_factors=self.heavy_trial_factors,
            refine_factors=self.refine_factors,
            prediction_factor=np.float32(self.prediction_factor),
            has_zero=self.zero_code is not None,
        )

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        scaled, shifts = normalise_rows(x, _ORDINARY_EXPONENTS)
        qw = normalise_importance(importance_rows(importance))
        found = TrellisFit(
            np.empty((rows, n // 32), np.uint8), np.empty((rows, n // 32), np.uint8),
            np.empty(rows * n // self.size, np.int32), np.empty(rows, np.float32),
        )  # fmt: skip
        fit_rows(np.abs(scaled) if self.absolute else scaled, qw, self.search, found)
        variants, multiple_indices, indices, d = found
        is_zero = variants == NO_VARIANT
        codes = self.variants[np.where(is_zero, 0, variants), multiple_indices]
        codes = np.where(is_zero, self.zero_code or 0, codes).astype(np.uint8)
        if len(self.codebooks) > 1:
            second = (variants >= len(self.variants) // 2) & ~is_zero
            indices |= np.repeat(second.reshape(-1).astype(np.int32), 32 // self.size) << self.bits
        fields = BlockFields.of(self.name)
        numbers = {"codes": indices, "scales": codes >> 1 if len(self.codebooks) > 1 else codes}
        if self.absolute:
            numbers["signs"] = (x < 0).astype(np.uint8)
        q = fields.pack(rows, n, **numbers)
        q[d == 0] = 0
        fields.write_scale(q, np.ldexp(d * np.float32(self.scale_factor), shifts))
        return q


_IQ4_MULTIPLES = IQ4_VALUES.astype(np.float32)
_IQ4_VARIANTS = np.stack([np.arange(8, 16), np.arange(7, -1, -1)])  # its positive and its negative entries, from 0 outwards
_SEVEN_BIT_MULTIPLES = (np.arange(256) >> 1).astype(np.float32) - 64  # bit 0 says which codebook
_SEVEN_BIT_STEPS = np.arange(1, 64) * 2
_REFINE_FACTORS = _geometric_sequence(1.38, 16)
_NOT_REFINED = np.empty(0, np.float32)

_TYPES = (
    TrellisType(
        "iq1_kt", 13, 8, (_FIRST_STATE,), False, _IQ4_MULTIPLES, _IQ4_VARIANTS, (85, 135),
        _trial_factors(1, 0, 3, 0.15), _trial_factors(3, 0.15), _NOT_REFINED, 0.5, (800, 50, 700, 0), 0.0079, scale_factor=1.07,
    ),
    TrellisType(
        "iq2_kt", 16, 8, (_FIRST_STATE,), False, _IQ4_MULTIPLES, _IQ4_VARIANTS, (75, 120),
        _trial_factors(1, 0, 3, 0.12), _trial_factors(3, 0.15), _NOT_REFINED, 0.35, (280, 250, 400, 0), 0.0081,
    ),
    TrellisType(
        "iq3_kt", 16, 8, (_FIRST_STATE,), True, np.arange(16, dtype=np.float32),
        np.arange(1, 16)[None], (14, 15), _trial_factors(5, 0.11), _trial_factors(11, 0.05), _REFINE_FACTORS, 0.5,
        (110, 30, 70, 20), 0.0081,
    ),
    TrellisType(
        "iq4_kt", 15, 4, (_FIRST_STATE, _SECOND_STATE), False, _SEVEN_BIT_MULTIPLES,
        np.stack([base + sign * _SEVEN_BIT_STEPS for base in (128, 129) for sign in (1, -1)]), (50, 54),
        _trial_factors(2, 0.18, 8, 0.022), _trial_factors(5, 0.1, 6, 0.018), _REFINE_FACTORS, 1.2, (20, 5, 10, 14), 0.0092,
    ),
)  # fmt: skip


def trellis_type(name: str) -> TrellisType:
    """The type of this name, in lower case."""
    return next(t for t in _TYPES if t.name == name)


CODECS: dict[str, Codec] = {t.name: Codec(t.encode, row_decoder(t.name)) for t in _TYPES}
