"""How long a collection is expected to take, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import numpy as np

from ...runtime import Model
from ...runtime.timing import head_seconds, layers_seconds
from ...simd.workers import Workers
from .inputs import Input
from .products import BLOCK
from .sums import Sums

_COLUMNS = 2048  # of the block that is measured
_KEEPING = 3e-9  # seconds of a thread for a byte of sums: to make it, and to fold and write it at the end
_SCORED = 0.5  # of the tokens, those whose predictions are


def expected_seconds(model: Model, inputs: Sequence[Input], tokens: int, n_ctx: int, passes: int) -> tuple[float, float]:
    """(seconds of running the text, in windows of n_ctx, through the model in all passes, seconds of the sums): a rough
    estimate, from the number of multiplications, products of each type, and a block that is summed once. On a machine that does
    nothing else."""
    threads = model.workers.count
    running = passes * layers_seconds(model, tokens, n_ctx) + (head_seconds(model, tokens * _SCORED) if model.has_head else 0.0)
    keeping = _KEEPING * sum(one.sums_bytes for one in inputs)
    summing = tokens * sum(_pairs(one) for one in inputs) / _products_per_second()
    return running / threads, (summing + keeping) / threads


@cache
def _products_per_second() -> float:
    """Products that one thread adds to sums per second of its own time, however busy the machine is, measured once."""
    block = np.ones((BLOCK, _COLUMNS), np.float32)
    sums, alone = Sums("", _COLUMNS), Workers(1)
    sums.add(block, 1, alone)
    times = []
    for _ in range(10):
        begun = time.thread_time()
        sums.add(block, 1, alone)
        times.append(time.thread_time() - begun)
    return BLOCK * _COLUMNS * _COLUMNS / 2 / max(min(times), 1e-6)


def _pairs(one: Input) -> float:
    """Products that a token adds; of a stack of experts only those that it is sent to, counted as one."""
    return one.columns**2 / 2 * (1 if one.is_stack_of_experts else one.matrices)
