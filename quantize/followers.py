"""Rows of tensors that follow what was quantised before: encoded for what a text tells of their inputs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..formats import SourceTensor, dims
from ..jobs.outputs import Produce
from ..simd.workers import ALONE, Workers
from .covariance.drift import Drift, Following
from .covariance.matrix.prepared import PreparedCovariance
from .tensor_outputs import TensorRows

_SAMPLED_MATRICES = 8  # of those that share an input
_TOKENS_SHARE = 0.5  # of those of the file that the covariance of the text's own inputs needs to take its place


class Followers:
    """The tensors that have one input: what they are encoded for, and with which covariance."""

    def __init__(self, drift_of: Callable[[int], Drift], matrices: int, threads: int, workers: Workers = ALONE):
        """drift_of: number of a matrix -> what is known of its inputs; matrices: that have inputs of their own; threads: that
        ask for rows; workers: that prepare an input."""
        self._drift_of, self._matrices, self._workers, self._once = drift_of, matrices, workers, _Once(threads + 1)

    def rows_of(self, produce: Produce) -> Produce:
        """Encoded rows of the targets of a tensor, in place of those of its weights."""
        assert isinstance(produce, TensorRows)
        tensor = produce.tensor
        rows = dims(tensor.shape)[1]

        def read(start: int, stop: int) -> np.ndarray:
            x = np.ascontiguousarray(tensor.read(start, stop), np.float32)
            return self._following(start // rows).target(tensor.name, x, start % rows)

        def covariance_of(matrix: int) -> PreparedCovariance | None:
            following = self._following(matrix)
            is_enough = following.tokens >= _TOKENS_SHARE * produce.collected_tokens(matrix)
            return following.prepared if is_enough else None

        return produce.of_targets(read, covariance_of)

    def _following(self, matrix: int) -> Following:
        number = matrix if self._matrices > 1 else 0  # of the input of a matrix
        return self._once.get(number, lambda: Following(self._drift_of(number), self._workers))


def sample(tensor: SourceTensor, number: int, matrices: int) -> np.ndarray:
    """Rows of a matrix, or, where `matrices` is 1, of several that share an input."""
    _, rows, count = dims(tensor.shape)
    chosen = [number] if matrices > 1 else range(0, count, -(-count // _SAMPLED_MATRICES))
    return np.concatenate([np.asarray(tensor.read(one * rows, (one + 1) * rows)[:: len(chosen)], np.float32) for one in chosen])


class _Once:
    """Makes things when they are first asked for, each once while threads wait; the last `most` are kept."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._made: OrderedDict[int, Future[Any]] = OrderedDict()

    def get(self, key: int, make: Callable[[], Any]) -> Any:
        """What `make` gives, or what it raises."""
        with self._lock:
            is_mine = key not in self._made
            future = self._made.setdefault(key, Future())
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        if is_mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()
