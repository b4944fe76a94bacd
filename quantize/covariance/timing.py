"""How long encoding with covariances would take on this machine, extrapolated from short runs.

A row's codes make up for the errors of all others, so that a weight takes the longer the more columns there are, and rows that
are encoded together: a type is timed at two widths, at a third for fewer columns, and with two numbers of rows, and
others are on the lines through these.
Preparing the covariance of n columns takes n^3 multiplications, as is timed at the wider of both; coupling m rows takes m^3.
Codes change until hardly any gets better, which takes as many sweeps as covariance, curvature and weights make it take: what is
timed are rows of a tensor with the leading columns of its covariance, or random ones where none is collected yet. What was
timed is kept for the process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from math import ceil
from typing import NamedTuple

import numpy as np

from ...formats import SourceTensor, TensorSource, TensorType, dims
from ...jobs.plan import Plan
from ..encode import encode
from ..timing import is_copied, predict_seconds
from .coupling import couple
from .matrix.covariance_matrix import Covariance
from .matrix.prepared import PreparedCovariance, prepare
from .matrix.triangles import FoldedCovariance
from .refine import takes_covariance
from .source import Covariances

PREPARING = "covariances"  # the key of the seconds that preparing takes, beside those of types
_WIDTHS = 1024, 4096  # columns at which types are timed; the second only where there are so many
_NARROW = 256  # of a first run, which compiles kernels, and the fewest at which types are timed
_ROWS, _WEIGHTS = 32, 1 << 15  # of a sample, at the least: with fewer what a call takes by itself counts
_COUPLED_ROWS = 256, 1024  # of one whose rows are encoded together; the second at the narrower width alone
_RANK = 256  # of random inputs
_timed_before: dict[tuple[object, ...], float] = {}
_compiled = set[tuple[str, bool]]()  # kernels: of a type, whether for rows that are encoded together


class _Work(NamedTuple):
    """Rows of one type and width. together: how many are encoded at once; 1: each by itself."""

    type_name: str
    columns: int
    together: int


class Encodings:
    """Rows that are to be encoded with covariances, added up, and how long that takes.

    weighed: weights by type and source type, of those that are
    """

    def __init__(self, covariances: Covariances | None):
        self._covariances, self.weighed = covariances, Counter[tuple[str, str]]()
        self._weights, self._prepared, self._blocks = Counter[_Work](), dict[Hashable, int](), Counter[int]()
        self._tensors = dict[tuple[bool, bool, int], SourceTensor]()  # by how well they serve as a sample

    def add(self, tensor: SourceTensor, kind: TensorType, weights: int, matrices: int | None = None) -> int:
        """Adds weights of a tensor in this type; returns how many of them are encoded with a covariance. matrices: that they
        are of; None: all."""
        collected = self._covariances.collected(tensor) if self._covariances is not None and takes_covariance(kind) else None
        if self._covariances is None or collected is None or not collected.has_enough_tokens.any():
            return 0
        coupling = self._covariances.row_coupling(tensor)
        enough, is_coupled = collected.has_enough_tokens, np.zeros(1, bool) if coupling is None else coupling.is_coupled
        together, with_more = round(is_coupled.mean() * weights), round(enough.mean() * weights)
        if coupling is not None:
            self._weights[_Work(kind.name, collected.columns, coupling.blocks.size)] += together
        self._weights[_Work(kind.name, collected.columns, 1)] += with_more - together
        self.weighed[kind.name, tensor.source_type] += with_more
        wide = collected.columns >= _WIDTHS[1]
        self._tensors.setdefault((coupling is None, not wide, collected.columns * (1 if wide else -1)), tensor)
        usable = np.flatnonzero(enough)[:matrices].tolist()
        self._prepared |= {self._covariances.key_of(tensor, i): collected.columns for i in usable}
        if coupling is not None:
            self._blocks[coupling.blocks.size] += round(is_coupled.sum() * weights / tensor.n_elements)
        return with_more

    def seconds(self, threads: int) -> dict[str, float]:
        """By type name on that many threads, with PREPARING for what the covariances take themselves."""
        if self._covariances is None or not self._weights:
            return {}
        used, sample = +self._weights, _Sample(self._covariances, self._tensors[min(self._tensors)] if self._tensors else None)
        most_columns = min(max(work.columns for work in used), sample.columns)
        most_columns = max(most_columns // _NARROW * _NARROW, min(most_columns, _NARROW))  # whole blocks of every type
        narrow_width, wide_width = (min(width, most_columns) for width in _WIDTHS)
        few, most = _COUPLED_ROWS[0], min(_COUPLED_ROWS[1], max((work.together for work in used), default=1))
        preparing, seconds = _preparing_seconds(sample, wide_width), dict[str, float]()
        narrowest = min(_NARROW, narrow_width)
        for work, count in used.items():
            rows = few if work.together > 1 else 1
            widths = (narrow_width, wide_width) if work.columns >= narrow_width else (narrowest, narrow_width)
            first, second = (_seconds_of_a_weight(sample, work.type_name, rows, n, threads) for n in widths)
            each = _on_line(work.columns, widths, (first, second))
            if work.together > few < most:
                narrow, many = (_seconds_of_a_weight(sample, work.type_name, n, narrow_width, threads) for n in (few, most))
                each += _on_line(work.together, (few, most), (narrow, many)) - narrow
            seconds[work.type_name] = seconds.get(work.type_name, 0.0) + count * each / threads
        cubes = sum((columns / wide_width) ** 3 for columns in self._prepared.values())
        coupled = sum(n * (size / few) ** 3 for size, n in self._blocks.items())
        coupling = coupled * _coupling_seconds(sample) if coupled else 0.0
        return seconds | {PREPARING: (cubes * preparing + coupling) / threads}


def _on_line(at: float, places: tuple[float, float], seconds: tuple[float, float]) -> float:
    """Seconds on the line through two places, which rises, from the first one on."""
    slope = max(0.0, seconds[1] - seconds[0]) / max(1, places[1] - places[0])
    return seconds[0] + slope * max(0, at - places[0])


def predict_seconds_with(covariances: Covariances, source: TensorSource, plan: Plan, threads: int) -> dict[str, float]:
    """`quantize.timing.predict_seconds` of a plan that encodes tensors of this source with covariances, with PREPARING for what
    these take themselves."""
    load = Encodings(covariances)
    for name, kind in plan.outputs.entries():
        tensor = source.tensors.get(name)
        if tensor is not None and not is_copied(kind):
            load.add(tensor, kind.type, kind.n_elements)
    seconds = predict_seconds(plan, threads, without=load.weighed)
    for name, more in load.seconds(threads).items():
        seconds[name] = seconds.get(name, 0.0) + more
    return seconds


class _Sample:
    """What types are timed on: the first rows of a tensor's first matrix that has a covariance, with the leading columns of
    this and what couples these rows; random ones where the tensor is None, too narrow, or nothing is collected yet.

    columns  as many as there are
    """

    def __init__(self, covariances: Covariances, tensor: SourceTensor | None):
        self.covariances, self._tensor, self._prepared = covariances, tensor, dict[int, PreparedCovariance]()
        self.key = covariances.identity, covariances.effort, "" if tensor is None else tensor.name

    @cached_property
    def _matrix(self) -> int:
        collected = self.covariances.collected(self._tensor) if self._tensor is not None else None
        return 0 if collected is None else int(np.flatnonzero(collected.has_enough_tokens)[0])

    @cached_property
    def _inputs(self) -> Covariance | None:
        moments = self.covariances.moments_of(self._tensor, self._matrix) if self._tensor is not None else None
        if not isinstance(moments, Covariance | FoldedCovariance) or moments.columns < min(_NARROW, _WIDTHS[0]):
            return None
        return moments if isinstance(moments, Covariance) else Covariance(moments.matrix, moments.tokens)

    @property
    def columns(self) -> int:
        return _WIDTHS[1] if self._inputs is None else self._inputs.columns

    def rows(self, count: int, columns: int) -> np.ndarray:
        """float32 [count, columns] or fewer rows."""
        if self._inputs is None or self._tensor is None:
            return np.random.default_rng(1).standard_normal((count, columns), np.float32) * np.float32(0.02)
        _, most, matrices = dims(self._tensor.shape)
        first = self._matrix * most if matrices > 1 else 0
        return np.ascontiguousarray(self._tensor.read(first, first + min(count, most // _ROWS * _ROWS or most))[:, :columns])

    def prepared(self, columns: int) -> PreparedCovariance:
        if columns not in self._prepared:
            found = prepare(_leading(self._inputs, columns) if self._inputs is not None else _random_moments(columns))
            assert found.damped is not None
            _ = found.damped.triangle
            self._prepared[columns] = found
        return self._prepared[columns]

    def gradients(self, rows: int) -> Covariance:
        """Second moments of the gradients at the outputs of so many rows, or fewer."""
        coupling = None
        if self._inputs is not None and self._tensor is not None:
            coupling = self.covariances.row_coupling(self._tensor)
        if coupling is None:
            return _random_moments(rows)
        matrix, block = (int(n) for n in np.argwhere(coupling.is_coupled)[0])
        found = coupling.gradient_of(matrix, block)
        return _leading(found, min(rows, found.columns))


def _leading(moments: Covariance, columns: int) -> Covariance:
    """Those of the first columns, as if as many tokens had been seen for each column: damping depends on that."""
    tokens = ceil(moments.tokens * columns / moments.columns)
    return Covariance(np.ascontiguousarray(moments.matrix[:columns, :columns]), tokens)


def _random_moments(columns: int) -> Covariance:
    """Of random inputs with few directions, and noise."""
    factors = np.random.default_rng(0).standard_normal((columns, _RANK), np.float32) / np.float32(np.sqrt(_RANK))
    matrix = factors @ factors.T
    matrix[np.diag_indices(columns)] += np.float32(0.1)
    return Covariance(matrix, 100 * columns)


def _timed(call: Callable[[], object]) -> float:
    """Seconds of this thread."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _once(key: tuple[object, ...], measure: Callable[[], float]) -> float:
    if key not in _timed_before:
        _timed_before[key] = measure()
    return _timed_before[key]


def _preparing_seconds(sample: _Sample, columns: int) -> float:
    def measure() -> float:
        sample.prepared(_NARROW)  # which compiles the kernels
        _ = sample.columns  # which reads it
        return _timed(partial(sample.prepared, columns))

    return _once(("preparing", *sample.key, columns), measure)


def _coupling_seconds(sample: _Sample) -> float:
    """Of the first of _COUPLED_ROWS."""

    def measure() -> float:
        gradients = sample.gradients(_COUPLED_ROWS[0])
        couple(gradients)
        return _timed(partial(couple, gradients)) * (_COUPLED_ROWS[0] / gradients.columns) ** 3

    return _once(("coupling", *sample.key), measure)


def _seconds_of_a_weight(sample: _Sample, type_name: str, together: int, columns: int, threads: int) -> float:
    """Of a thread, while all are at it, of so many rows that are encoded together (or of as many as there are), 1: each by
    itself."""

    def measure() -> float:
        gradients = sample.gradients(together) if together > 1 else None
        coupled_rows = None if gradients is None else couple(gradients)
        rows = max(1, _WEIGHTS // columns // _ROWS) * _ROWS  # whole groups of types that interleave rows
        x = sample.rows(rows if gradients is None else gradients.columns, columns)

        def run(part: np.ndarray) -> None:
            prepared = sample.prepared(part.shape[1])
            encode(part, type_name, covariance=prepared, effort=sample.covariances.effort, coupled=coupled_rows)

        if (type_name, together > 1) not in _compiled:
            run(np.ascontiguousarray(x[:, :_NARROW]))
            _compiled.add((type_name, together > 1))
        sample.prepared(columns)
        with ThreadPoolExecutor(threads) as pool:
            taken = list(pool.map(lambda _: _timed(partial(run, x)), range(threads)))
        return sum(taken) / len(taken) / x.size

    return _once((*sample.key, type_name, together, columns, threads), measure)
