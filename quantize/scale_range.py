"""Rows whose weights are too large or too small for the scales of their type, most of which are float16.

float16 ends at 65504, and below 2^-14 it has fewer digits, down to one at 2^-24. An encoder then clips or drops scales, and
rows become coarse, zero or far too small. Rows of ordinary magnitude are only looked at for their largest weight; others are
decoded and compared with what the type makes of the same rows times a power of two. Small rows that are far coarser are encoded
again with what `subnormal_scales` can do; what stays coarse is a warning, or an error.
"""

from __future__ import annotations

import logging
import threading
from functools import cache

import numpy as np

from ..formats import MillError, SourceTensor, TensorType, dims
from ..formats.layouts import layout_of
from .encode import decode, encode
from .subnormal_scales import has_float16_scales, refit

_LARGEST_PLAIN = 2.0**15  # weights up to here overflow no float16
_UNITS = 16  # a scale of this many times the smallest float16 is as good as any
_F16_UNIT = 2.0**-24
NEGLIGIBLE = 2.0**-10  # of the tensor's largest weight: coarse rows below that are a warning, no error
_READ_ELEMENTS = 1 << 22  # that are read at a time to find the largest
_log = logging.getLogger("ggufmill")


@cache
def plain_range(name: str) -> tuple[float, float] | None:
    """Smallest and largest amax of a row that the type's scales surely hold; None if they have float32's range."""
    layout = layout_of(name)
    if layout.number is not None:
        return (_UNITS * _F16_UNIT, _LARGEST_PLAIN) if layout.number == "f16" else None
    value = float(np.abs(layout.values).max() + max(map(abs, layout.shifts))) * layout.unit
    levels = np.abs(layout.levels).astype(np.float64) if layout.levels is not None else np.ones(1)
    if layout.d is None and layout.row_scale is None:
        return value * _UNITS * float(levels[levels > 0].min()), value * float(levels.max())
    if not has_float16_scales(name):
        return None
    return value * float(levels.max()) * _UNITS * _F16_UNIT, _LARGEST_PLAIN


def row_errors(x: np.ndarray, q: np.ndarray, name: str) -> np.ndarray:
    """|decoded - x| / |x| of each row, float64 [rows]; 0 for rows of zeros that decode to zeros."""
    amax = np.abs(x).max(1, initial=0).astype(np.float64)[:, None]
    amax[amax == 0] = 1
    scaled = x / amax
    difference = np.square(decode(q, name, x.shape[1]) / amax - scaled).sum(1)
    squares = np.square(scaled).sum(1)
    return np.sqrt(difference / np.where(squares > 0, squares, 1))


class ScaleRange:
    """Looks at the encoded rows of one tensor. See `fit`."""

    def __init__(self, tensor: SourceTensor, target: TensorType, warn: bool = True):
        """warn: rows that stay coarse are a warning or an error."""
        self._tensor, self._target, self._warns = tensor, target, warn
        self._range = plain_range(target.name)
        self._lock, self._warned = threading.Lock(), False
        self._largest: float | None = None

    def suspects(self, x: np.ndarray) -> np.ndarray:
        """Numbers of the rows that the type's scales may not hold, in complete groups of interleaved rows."""
        if self._range is None or not x.size:
            return np.empty(0, np.intp)
        from .codecs.float_range import row_amax  # imports numba, which plans do not need

        amax = row_amax(np.ascontiguousarray(x, np.float32))
        group = self._target.rows
        found = np.unique(np.flatnonzero((amax > 0) & ((amax < self._range[0]) | (amax > self._range[1]))) // group)
        return (found[:, None] * group + np.arange(group)).reshape(-1)

    def fit(
        self, x: np.ndarray, q: np.ndarray, importance: np.ndarray | None, start: int, factor: float = 1, plain: bool = True
    ) -> np.ndarray:
        """The rows q with those that are far coarser than the type encoded again, where `subnormal_scales` can hold them.

        x float32 [rows, n]: what was encoded as q, rows from `start` on; factor: what x is of the tensor, divided by. plain: q
        has the least plain error, else (under a covariance) rows are judged by what an encoding without it makes of them.
        Raises MillError for a row that overflows, or that is lost and not negligible compared with the tensor's other weights;
        other rows that stay coarser than the type gives a warning, one per tensor.
        """
        rows = self.suspects(x)
        if not len(rows):
            return q
        assert self._range is not None
        name, x = self._target.name, x[rows]
        amax = np.abs(x).max(1)
        errors = row_errors(x, q[rows] if plain else encode(x, name, importance), name)
        normal = np.ldexp(x, -np.frexp(amax)[1][:, None])
        expected = row_errors(normal, encode(normal, name, importance), name)
        halfway = np.maximum((1 + expected) / 2, 1.02 * expected)
        limit = np.minimum(2 * expected + 0.01, halfway)
        by_group = (-1, self._target.rows)
        again = ((amax > 0) & (errors > limit)).reshape(by_group).any(1) & (amax.reshape(by_group) <= self._range[1]).all(1)
        if again.any() and has_float16_scales(name):
            again = np.repeat(again, self._target.rows)
            refitted = refit(x[again], name, importance)
            found, before = row_errors(x[again], refitted, name), row_errors(x[again], q[rows[again]], name)
            better = np.square(found).reshape(by_group).sum(1) < np.square(before).reshape(by_group).sum(1)
            better = np.repeat(better, self._target.rows)
            q = q.copy()
            q[rows[again][better]] = refitted[better]
            errors[np.flatnonzero(again)[better]] = found[better]
        lost = (errors > limit) & (errors > halfway) | (errors >= 1) & (expected < 1)
        coarse = np.flatnonzero((amax > 0) & ((errors > limit) | lost))
        if self._warns and len(coarse):
            large = amax[coarse] > self._range[1]
            self._report(start + rows[coarse], amax[coarse].astype(np.float64) * factor, errors[coarse], lost[coarse], large)
        return q

    def _report(self, rows: np.ndarray, amax: np.ndarray, errors: np.ndarray, lost: np.ndarray, large: np.ndarray) -> None:
        """Raises MillError, or warns, of rows that are coarse; amax: of the tensor's own weights."""
        for i in np.flatnonzero(lost | large):
            weight = float(amax[i])
            if large[i] or weight > NEGLIGIBLE * self._largest_weight(weight / NEGLIGIBLE):
                raise MillError(self._error(int(rows[i]), weight, float(errors[i]), bool(large[i])))
        self._warn(len(rows), int(rows[0]), int(rows[-1]))

    def _error(self, row: int, weight: float, error: float, overflows: bool) -> str:
        _, count, matrices = dims(self._tensor.shape)
        matrix, row = divmod(row, count)
        where = f"row {row}" + (f" of matrix {matrix}" if matrices > 1 else "")
        name = self._tensor.name
        return (
            f"{name}: {where} (largest weight {weight:.3g}) is too {'large' if overflows else 'small'} for "
            f"{self._target.name} (relative error {error:.2g}): a damaged source, or a tensor for --custom-q '{name}=bf16'"
        )

    def _warn(self, count: int, first: int, last: int) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "%s: %d of the rows %d to %d have weights so small that %s makes them coarse or zero",
                self._tensor.name, count, first, last, self._target.name,
            )  # fmt: skip

    def _largest_weight(self, enough: float) -> float:
        """The tensor's largest weight, or one above `enough`."""
        with self._lock:
            if self._largest is None or self._largest <= enough:
                columns, rows = self._tensor.shape[0], int(np.prod(self._tensor.shape[1:]))
                _, per_matrix, _ = dims(self._tensor.shape)
                step, largest = max(1, _READ_ELEMENTS // columns), 0.0
                starts = [
                    (m + s, m + min(s + step, per_matrix))
                    for m in range(0, rows, per_matrix)
                    for s in range(0, per_matrix, step)
                ]
                for start, stop in starts:
                    x = np.abs(self._tensor.read(start, stop))
                    largest = max(largest, float(x.max(initial=0, where=np.isfinite(x))))
                    if largest > enough:
                        break
                self._largest = largest
            return self._largest
