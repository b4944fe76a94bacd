"""What is said of rows that their type cannot hold: an error that names the row, or a warning for negligible ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from ..formats import MillError, SourceTensor, dims
from .scale_range import CoarseRows

NEGLIGIBLE = 2.0**-10  # of the tensor's largest weight: coarse rows below that are a warning, no error
_SMALLEST_BF16, _LARGEST_BF16 = 2.0**-126, 2.0**127  # within which bf16 is the type to take instead
_READ_ELEMENTS = 1 << 22  # that are read at a time to find the largest
_log = logging.getLogger("ggufmill")


class CoarseRowReport:
    """Raises MillError, or warns once, of coarse rows of one tensor or array. See `of_tensor` and `of_array`."""

    def __init__(self, name: str, type_name: str, rows: int, matrices: int, largest: Callable[[float], float]):
        """name: of the tensor, "" for an array; rows: of a matrix; largest: (enough) -> the largest weight, or one above it."""
        self._name, self._type, self._rows, self._matrices, self._find_largest = name, type_name, rows, matrices, largest
        self._lock, self._warned = threading.Lock(), False
        self._largest: float | None = None

    @classmethod
    def of_tensor(cls, tensor: SourceTensor, type_name: str) -> CoarseRowReport:
        return cls(tensor.name, type_name, *dims(tensor.shape)[1:], partial(_largest_in_tensor, tensor))

    @classmethod
    def of_array(cls, x: np.ndarray, type_name: str) -> CoarseRowReport:
        """x: [rows, columns]."""
        return cls("", type_name, max(1, len(x)), 1, lambda enough: float(np.abs(x).max(initial=0)))

    def __call__(self, coarse: CoarseRows, start: int = 0, factor: float = 1) -> None:
        """start: number of the first row of those that were encoded; factor: on these, to get the tensor's own weights."""
        smallest, largest = coarse.limits
        weights = coarse.amax.astype(np.float64)
        for i in np.flatnonzero(coarse.lost | (weights > largest)):
            weight = float(weights[i]) * factor
            is_small = weights[i] < smallest
            if not is_small or weight > NEGLIGIBLE * self._largest_weight(weight / NEGLIGIBLE):
                cause = "too large" if weights[i] > largest else "too small" if is_small else "too uneven"
                raise MillError(self._error(start + int(coarse.rows[i]), weight, float(coarse.errors[i]), cause))
        self._warn(len(coarse.rows), start + int(coarse.rows[0]), start + int(coarse.rows[-1]))

    def _error(self, row: int, weight: float, error: float, cause: str) -> str:
        matrix, row = divmod(row, self._rows)
        where = f"row {row}" + (f" of matrix {matrix}" if self._matrices > 1 else "")
        wider = "bf16" if _SMALLEST_BF16 <= weight <= _LARGEST_BF16 and not self._type.startswith("bf16") else "f32"
        advice = f"a damaged source, or a tensor for --custom-q '{self._name}={wider}'" if self._name else f"try {wider}"
        return (
            f"{self._name or 'encode'}: {where} (largest weight {weight:.3g}) is {cause} for "
            f"{self._type} (relative error {error:.2g}): {advice}"
        )

    def _warn(self, count: int, first: int, last: int) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "%s: %d of the rows %d to %d have weights so small that %s makes them coarse or zero",
                self._name or "encode", count, first, last, self._type,
            )  # fmt: skip

    def _largest_weight(self, enough: float) -> float:
        """The largest weight, or one above `enough`."""
        with self._lock:
            if self._largest is None or self._largest <= enough:
                self._largest = self._find_largest(enough)
            return self._largest


def _largest_in_tensor(tensor: SourceTensor, enough: float) -> float:
    columns, rows, matrices = dims(tensor.shape)
    step, largest = max(1, _READ_ELEMENTS // columns), 0.0
    for first in range(0, rows * matrices, rows):
        for start in range(first, first + rows, step):
            x = np.abs(tensor.read(start, min(start + step, first + rows)))
            largest = max(largest, float(x.max(initial=0, where=np.isfinite(x))))
            if largest > enough:
                return largest
    return largest
