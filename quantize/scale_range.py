"""Rows that their type cannot hold as an encoder writes them: encoded in another way, and reported where that does not help.

Scales end: float16 at 65504, and below 2^-14 it has fewer digits, down to one at 2^-24; float32, bfloat16 and powers of two
(e8m0) end near 2^127 and 2^-126. An encoder then clips or drops scales, and rows become coarse, zero, infinite or far too
small. Of rows of ordinary magnitude only the largest weight is looked at for that; others are decoded and compared with what
the type makes of the same rows times a power of two. Those that are far coarser are encoded again: as multiples of that power
of two where scales have an exponent of eight bits, else with what `subnormal_scales` can do.

Encoders that search give weights of little importance any value. Without importance those are weights near 0, and in rows of
few others all of them together may be farther away from 0 than the row is. Rows that are no nearer than zeros are encoded again
with more even importance. Rows whose weights are rounded to the nearest value (`Codec.rounds`) need no such look: an error is
at most half a step, and the largest weight, which is several steps, alone has more than 32 of these together.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from ..formats import layouts
from .plain_rows import PlainRows, float_range
from .subnormal_scales import encode_small, has_float16_scales

_LARGEST_PLAIN = 2.0**15  # weights up to here overflow no float16
_UNITS = 16  # a scale of this many times the smallest float16 is as good as any
_F16_UNIT = 2.0**-24
_F32_RANGE = 2.0**-50, 2.0**120  # with float32 scales; encoders of the IQK types take rows below 1e-16 for zeros
_E8M0_RANGE = 2.0**-110, 2.0**126  # with powers of two as scales
_BF16_RANGE = 2.0**-118, 2.0**127  # whose last multiples of 2^-133 are one in 256
_NEARER = 1 - 1e-4  # an error below this many times the row's norm is one that zeros do not have
_EVEN_SHARE = 16  # of the mean importance, this part of which is given to all columns
# A block's float16 scale and minimum below 2^-14 may be off by 2^-25, its weights by 2^-21. Beside a weight of this size that
# is nothing in a row of up to 2^20 of them.
_LEAST_ROUNDED = 2.0**-11
_LARGEST_E8M0 = 254  # exponent code; 255 is NaN
_NO_ROWS = np.empty(0, np.intp)
_WORSE = 1 + 1e-3  # an error above this many times the row's norm is one that a type never has to have


@cache
def plain_range(name: str) -> tuple[float, float] | None:
    """Smallest and largest amax of a row that the type's scales surely hold; None if it holds every float32."""
    layout = layouts.layout_of(name)
    if layout.number is not None:
        return {"f16": (_UNITS * _F16_UNIT, _LARGEST_PLAIN), "bf16": _BF16_RANGE}.get(layout.number)
    value = float(np.abs(layout.values).max() + max(map(abs, layout.shifts))) * layout.unit
    levels = np.abs(layout.levels).astype(np.float64) if layout.levels is not None else np.ones(1)
    if layout.d is None and layout.row_scale is None:
        return value * _UNITS * float(levels[levels > 0].min()), value * float(levels.max())
    if has_float16_scales(name):
        return value * float(levels.max()) * _UNITS * _F16_UNIT, _LARGEST_PLAIN
    return _E8M0_RANGE if layout.d_format == "e8m0" else _F32_RANGE


def relative_row_errors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|y - x| / |x| of each row, float64 [rows]; 0 for rows of zeros that are zeros in y."""
    amax = np.abs(x).max(1, initial=0).astype(np.float64)[:, None]
    amax[amax == 0] = 1
    scaled = x / amax
    difference = np.square(y / amax - scaled).sum(1)
    squares = np.square(scaled).sum(1)
    return np.sqrt(difference / np.where(squares > 0, squares, 1))


class CoarseRows(NamedTuple):
    """Rows that stay far coarser than their type is for others, of an array that was encoded.

    rows    their numbers
    amax    float32: the largest magnitude of each; errors: |decoded - x| / |x|
    lost    bool: whether hardly anything of a row is left
    limits  the smallest and the largest amax that the type surely holds
    """

    rows: np.ndarray
    amax: np.ndarray
    errors: np.ndarray
    lost: np.ndarray
    limits: tuple[float, float]


class Report(Protocol):
    """Is told of rows that stay coarse. It may raise MillError."""

    def __call__(self, coarse: CoarseRows, /) -> None: ...


class _Again:
    """Rows x of a call of `mended` that are encoded again, and what has been found for them so far."""

    def __init__(self, x: np.ndarray, q: np.ndarray, plain: PlainRows):
        self.x, self.q, self.plain, self.changed = x, q, plain, np.zeros(len(x), bool)
        self.errors = self.errors_of(q)

    def errors_of(self, q: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.nan_to_num(relative_row_errors(self.x, self.plain.decode(q, self.x.shape[1])), nan=np.inf)

    def take(self, q: np.ndarray, among: np.ndarray) -> None:
        """Takes the rows of q, of those `among` (bool), that are nearer than what there is; interleaved rows together."""
        errors, group = self.errors_of(q), (-1, self.plain.type.rows)
        squares = [np.square(np.minimum(e, 1e100)).reshape(group).sum(1) for e in (errors, self.errors)]
        better = (squares[0] < squares[1]) & among.reshape(group).any(1)
        better = np.repeat(better, self.plain.type.rows)
        self.q = np.where(better[:, None], q, self.q)
        self.errors = np.where(better, errors, self.errors)
        self.changed |= better


def mended(
    x: np.ndarray, q: np.ndarray, rows: np.ndarray, importance: np.ndarray | None, plain: PlainRows, report: Report | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows q with those that are far coarser than the type encoded again, and which these are (bool, None for none).

    x float32 [rows, n], C-contiguous, in whole groups of interleaved rows: what `plain` encoded as q; rows: its `suspects`.
    report is told of the rows that stay coarse.
    """
    again = _Again(x[rows], q[rows], plain)
    _with_even_importance(again, importance)
    amax = np.abs(again.x).max(1)
    limit, lost = _with_other_scales(again, amax, importance)
    coarse = np.flatnonzero((amax > 0) & (again.errors > limit) | lost)
    if report is not None and len(coarse):
        limits = plain_range(plain.type.name) or (0.0, np.inf)
        report(CoarseRows(rows[coarse], amax[coarse], again.errors[coarse], lost[coarse], limits))
    if not again.changed.any():
        return q, None
    q, changed = q.copy(), np.zeros(len(q), bool)
    q[rows], changed[rows] = again.q, again.changed
    return q, changed


def suspects(
    x: np.ndarray, q: np.ndarray, amax: np.ndarray | None, range_: tuple[float, float], is_weighted: bool, plain: PlainRows
) -> np.ndarray:
    """Numbers of the rows that the type's scales may not hold or that are worse than zeros, in complete groups.

    amax: the largest magnitude of each row, found here if None; range_: the least and the largest of these; is_weighted:
    whether importance was given.
    """
    least, largest = range_
    limits, found = plain_range(plain.type.name) or (0.0, np.inf), _NO_ROWS
    codec = plain.codec
    rounds = codec.rounds or (codec.rounds_without_importance and not is_weighted and least >= _LEAST_ROUNDED)
    is_within = least >= limits[0] and largest <= limits[1]
    if is_within and rounds:
        return found
    if amax is None:
        amax = float_range().row_amax(x)
        assert amax is not None
    if not is_within:
        found = np.flatnonzero((amax < limits[0]) | (amax > limits[1]))
        found = found[amax[found] > 0]
    if not rounds:
        from .codecs.row_errors import rows_not_nearer

        worse = rows_not_nearer(x, q, plain.type.name, amax)
        found = np.union1d(found, worse) if len(worse) else found
    if not len(found):
        return found
    group = plain.type.rows
    found = np.unique(found // group)
    return (found[:, None] * group + np.arange(group)).reshape(-1)


def _with_even_importance(again: _Again, importance: np.ndarray | None) -> None:
    """Encodes rows that are no nearer than zeros with more even importance, and then with none that differs."""
    even = [np.ones(again.x.shape[1], np.float32)]
    if importance is not None and importance.any():
        even.insert(0, importance + importance.mean() / _EVEN_SHARE)
    for each in even:
        worse = again.errors >= _NEARER
        if worse.any() and not again.plain.codec.rounds:
            again.take(again.plain.encode(again.x, each), worse)


def _with_other_scales(again: _Again, amax: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Encodes rows again that are far coarser than the same rows times a power of two.

    Returns the error above which a row counts as coarse, and whether a row is lost.
    """
    plain, exponents = again.plain, np.frexp(np.where(amax > 0, amax, 1))[1]
    normal_x = np.ldexp(again.x, -exponents[:, None])
    normal = _Again(normal_x, plain.encode(normal_x, importance), plain)
    _with_even_importance(normal, importance)
    expected = normal.errors
    halfway = np.maximum((1 + expected) / 2, 1.02 * expected)
    limit = np.minimum(2 * expected + 0.01, halfway)
    coarse = again.errors > limit
    if coarse.any() and _exponents_are_wide(plain.type.name):
        again.take(_times_powers(normal.q, exponents, plain.type.name), coarse)
    elif coarse.any() and has_float16_scales(plain.type.name):
        limits, group = plain_range(plain.type.name), plain.type.rows
        assert limits is not None
        small = np.repeat((amax.reshape(-1, group) <= limits[1]).all(1) & coarse.reshape(-1, group).any(1), group)
        ones = np.ones(again.x.shape[1], np.float32)
        for which, weights in ((small & ~normal.changed, importance), (small & normal.changed, ones)):
            if which.any():
                q = again.q.copy()
                q[which] = encode_small(again.x[which], plain, weights)
                again.take(q, which)
    errors, limits = again.errors, plain_range(plain.type.name)
    zeros = (errors >= _NEARER) & (errors > expected)
    if limits is not None:
        zeros &= (amax < limits[0]) | (amax > limits[1])
    return limit, (errors > limit) & (errors > halfway) | zeros | (errors > _WORSE)


def _exponents_are_wide(name: str) -> bool:
    """Whether the type's scales are float32 numbers of rows, or powers of two of blocks."""
    layout = layouts.layout_of(name)
    return layout.row_scale == "f32" or (layout.d is not None and layout.d_format == "e8m0")


def _times_powers(q: np.ndarray, exponents: np.ndarray, name: str) -> np.ndarray:
    """Rows whose scales are multiplied by 2^exponents, int [rows], as far as they can be."""
    from .codecs.fields import BlockFields

    fields, q = BlockFields.of(name), q.copy()
    if fields.layout.row_scale is not None:
        with np.errstate(over="ignore"):
            fields.write_scale(q, np.ldexp(fields.read_scale(q), exponents[:, None]))
    else:
        fields.write(q, "d", np.clip(fields.read(q, "d") + exponents[:, None], 0, _LARGEST_E8M0).astype(np.uint8))
    return q
