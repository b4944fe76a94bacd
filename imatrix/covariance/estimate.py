"""How long a collection is expected to take, said before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from ...runtime import Model
from ...runtime.timing import head_seconds, layers_seconds, seconds_of_threads, waiting
from ...simd.workers import Workers
from .inputs import Input
from .sums import Sums

_COLUMNS = 2048  # of the block that is measured, at most
_KEEPING = 3e-9  # seconds of a thread for a byte of sums: to make it, and to fold and write it at the end
_SCORED = 0.5  # of the tokens, those whose predictions are


def expected_seconds(model: Model, inputs: Sequence[Input], tokens: int, n_ctx: int, passes: int) -> tuple[float, float]:
    """(seconds of running the text, in windows of n_ctx, through the model in all passes, seconds of the sums): a rough
    estimate, from the number of multiplications, products of each type, and a block that is summed once. On a machine that does
    nothing else."""
    threads, rows_of = model.workers.count, Counter[tuple[int, int]]()
    running = passes * layers_seconds(model, tokens, n_ctx, is_observed=True)
    running += head_seconds(model, tokens * _SCORED) if model.has_head else 0.0
    for one in inputs:
        rows_of[one.columns, one.block] += tokens * one.rows_of_token
    summing = sum(count * _seconds_of_row(*widths, threads) for widths, count in rows_of.items())
    summing *= waiting()
    keeping = _KEEPING * sum(one.sums_bytes for one in inputs)
    return running / threads, (summing + keeping) / threads


@cache
def _seconds_of_row(columns: int, rows: int, threads: int) -> float:
    """Of all threads together, for a row that is added to sums of so many columns, in blocks of so many rows, measured once; of
    wide ones by the products of fewer."""
    if columns > _COLUMNS:
        return _seconds_of_row(_COLUMNS, rows, threads) * (columns / _COLUMNS) ** 2
    block, sums, workers = np.ones((rows, columns), np.float32), Sums("", columns, rows), Workers(threads)
    return seconds_of_threads(lambda: sums.add(block, 1, workers), workers) / rows
