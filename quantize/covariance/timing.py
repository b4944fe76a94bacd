"""How long encoding with covariances would take on this machine, extrapolated from short runs with random ones.

A row's codes make up for the errors of all others, so that a weight takes the longer the more columns there are: a type is
timed at two widths, and others are on the line through both. Preparing the covariance of n columns takes n^3 multiplications,
as is timed at the wider of both; coupling m rows takes m^3. What was timed is kept for the process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from ...formats import TYPES, SourceTensor, TensorSource, TensorType
from ...jobs.plan import Plan
from ..encode import encode
from ..timing import REST, is_copied, predict_seconds
from .coupling import couple
from .matrix.covariance_matrix import Covariance
from .matrix.prepared import PreparedCovariance, prepare
from .refine import takes_covariance
from .source import Covariances

PREPARING = "covariances"  # the key of the seconds that preparing takes, beside those of types
_WIDTHS = 1024, 4096  # columns at which types are timed; the second only where there are so many
_NARROW = 256  # of a first run, which compiles kernels
_ROWS, _COUPLED_ROWS = 32, 128  # of a sample
_ROW = 2.4  # columns whose time a row of those that are encoded together takes (iq3_k, q4_K, 128 to 1,024 rows, Zen 5)
_RANK = 256


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
        usable = np.flatnonzero(enough)[:matrices].tolist()
        self._prepared |= {self._covariances.key_of(tensor, i): collected.columns for i in usable}
        if coupling is not None:
            self._blocks[coupling.blocks.size] += round(is_coupled.sum() * weights / tensor.n_elements)
        return with_more

    def seconds(self, threads: int) -> dict[str, float]:
        """By type name on that many threads, with PREPARING for what the covariances take themselves."""
        if self._covariances is None or not self._weights:
            return {}
        used = +self._weights
        widths = _WIDTHS if any(work.columns > _WIDTHS[0] for work in used) else _WIDTHS[:1]
        preparing, lines, seconds = _preparing_seconds(widths[-1]), {}, dict[str, float]()
        for work, count in used.items():
            kind = work.type_name, work.together > 1
            if kind not in lines:
                lines[kind] = [_seconds_of_a_weight(*kind, n, self._covariances.effort, threads) for n in widths]
            narrow, wide = lines[kind][0], lines[kind][-1]
            slope = max(0.0, wide - narrow) / (_WIDTHS[1] - _WIDTHS[0])
            more = max(0, work.columns - _WIDTHS[0]) + _ROW * max(0, work.together - _COUPLED_ROWS)
            each = narrow + slope * more + REST
            seconds[work.type_name] = seconds.get(work.type_name, 0.0) + count * each / threads
        for cached in (_prepared, _moments):  # they take memory
            cached.cache_clear()
        cubes = sum((columns / widths[-1]) ** 3 for columns in self._prepared.values())
        coupled = sum(n * (size / _COUPLED_ROWS) ** 3 for size, n in self._blocks.items())
        coupling = coupled * _coupling_seconds() if coupled else 0.0
        return seconds | {PREPARING: (cubes * preparing + coupling) / threads}


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


@cache
def _moments(columns: int) -> Covariance:
    """Of random inputs with few directions, and noise."""
    factors = np.random.default_rng(0).standard_normal((columns, _RANK), np.float32) / np.float32(np.sqrt(_RANK))
    matrix = factors @ factors.T
    matrix[np.diag_indices(columns)] += np.float32(0.1)
    return Covariance(matrix, 100 * columns)


@cache
def _prepared(columns: int) -> PreparedCovariance:
    prepared = prepare(_moments(columns))
    assert prepared.damped is not None
    _ = prepared.damped.triangle
    return prepared


def _timed(call: Callable[[], object]) -> float:
    """Seconds of this thread."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


@cache
def _preparing_seconds(columns: int) -> float:
    _prepared(_COUPLED_ROWS)  # which compiles the kernels
    _moments(columns)
    return _timed(partial(_prepared, columns))


@cache
def _coupling_seconds() -> float:
    """Of the rows of a sample."""
    couple(_moments(_COUPLED_ROWS))
    return _timed(partial(couple, _moments(_COUPLED_ROWS)))


@cache
def _seconds_of_a_weight(type_name: str, coupled: bool, columns: int, effort: int, threads: int) -> float:
    """Of a thread, while all are at it."""
    rows, coupled_rows = (_COUPLED_ROWS, couple(_moments(_COUPLED_ROWS))) if coupled else (_ROWS, None)
    x = np.random.default_rng(1).standard_normal((rows, columns), np.float32) * np.float32(0.02)

    def run(part: np.ndarray) -> None:
        prepared = _prepared(part.shape[1])
        encode(part, TYPES[type_name].name, covariance=prepared, effort=effort, coupled=coupled_rows)

    run(np.ascontiguousarray(x[:, :_NARROW]))  # which compiles the kernels
    with ThreadPoolExecutor(threads) as pool:
        taken = list(pool.map(lambda _: _timed(partial(run, x)), range(threads)))
    return sum(taken) / len(taken) / x.size
