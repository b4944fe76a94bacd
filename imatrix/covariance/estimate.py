"""How long a collection is expected to take, said before it begins."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from ...runtime import Model
from ...runtime.timing import head_seconds, layers_seconds
from ...simd.workers import Workers
from .inputs import Input
from .products import BLOCK
from .sums import Sums

_COLUMNS = 2048  # of the block that is measured, at most
_CALLS, _MEASURED = 3, 0.02  # how often it is added, and seconds of that together, at the least
_KEEPING = 3e-9  # seconds of a thread for a byte of sums: to make it, and to fold and write it at the end
_SCORED = 0.5  # of the tokens, those whose predictions are


def expected_seconds(model: Model, inputs: Sequence[Input], tokens: int, n_ctx: int, passes: int) -> tuple[float, float]:
    """(seconds of running the text, in windows of n_ctx, through the model in all passes, seconds of the sums): a rough
    estimate, from the number of multiplications, products of each type, and a block that is summed once. On a machine that does
    nothing else."""
    threads, tokens_of = model.workers.count, Counter[int]()
    running = passes * layers_seconds(model, tokens, n_ctx, is_observed=True)
    running += head_seconds(model, tokens * _SCORED) if model.has_head else 0.0
    for one in inputs:  # of a stack of experts only those that a token is sent to, counted as one
        tokens_of[one.columns] += tokens * (1 if one.is_stack_of_experts else one.matrices)
    summing = sum(count * _seconds_of_token(columns, threads) for columns, count in tokens_of.items())
    keeping = _KEEPING * sum(one.sums_bytes for one in inputs)
    return running / threads, (summing + keeping) / threads


@cache
def _seconds_of_token(columns: int, threads: int) -> float:
    """Of all threads together, for a token that is added to sums of so many columns, on average, measured once; of wide ones by
    the products of fewer."""
    if columns > _COLUMNS:
        return _seconds_of_token(_COLUMNS, threads) * (columns / _COLUMNS) ** 2
    block, sums, workers = np.ones((BLOCK, columns), np.float32), Sums("", columns), Workers(threads)
    sums.add(block, 1, workers)
    calls, begun = 0, time.process_time()
    while calls < _CALLS or time.process_time() - begun < _MEASURED:
        sums.add(block, 1, workers)
        calls += 1
    return (time.process_time() - begun) / (calls * BLOCK)
