"""Which scores of a row are the largest: their numbers, in ascending order.

The bits of a float, those of a negative one reversed, are in the order of the numbers. The 11 upper ones of the smallest score
that is taken follow from how many scores have which, the next 11 and the last 10 from those that share what is known of it
(radix selection).
"""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.memory import fill, view
from ......simd.team import TaskKernel

_HIGH, _MIDDLE = 21, 10  # lowest bits of the first two parts
_BINS = 2048
# Operands: scores float32 [tokens, heads, step]; counts int64 [tokens]: scores of a row; wanted: numbers that are taken, fewer
# than there are scores; always: the last scores, which are taken whatever they are; out: float32 numbers of the scores,
# token_bytes from one token's to the next, head_bytes from one head's. NaN counts as more than infinity, or less, by its sign.
LARGEST = np.dtype(
    [(name, np.int64) for name in ("scores", "heads", "step", "counts", "wanted", "always", "out", "token_bytes", "head_bytes")]
)


@kernel
def _ordered(bits):
    """int32 bits of a float -> from 0 to 2^32 - 1, in the order of the floats."""
    signed = np.int64(bits)
    return (signed ^ (signed >> 63 & 0x7FFFFFFF)) + (1 << 31)


@kernel
def _bin_of(bins, wanted):
    """(the bin of the wanted-th largest, how many of it are taken), of counts by bin."""
    number = bins.size - 1
    while bins[number] < wanted:
        wanted -= bins[number]
        number -= 1
    return number, wanted


def _take(task, number):
    token, head = number // task.heads, number % task.heads
    count = view(task.counts + 8 * token, 1, np.int64)[0]
    at = task.scores + 4 * number * task.step
    scores, bits = view(at, count, np.float32), view(at, count, np.int32)
    for j in range(max(0, count - task.always), count):
        scores[j] = np.inf
    bins, near = np.zeros(_BINS, np.int64), np.empty(count, np.int64)
    for j in range(count):
        bins[_ordered(bits[j]) >> _HIGH] += 1
    high, wanted = _bin_of(bins, task.wanted)
    found = 0
    fill(bins, 0)
    for j in range(count):
        key = _ordered(bits[j])
        if key >> _HIGH == high:
            near[found] = key
            bins[(key >> _MIDDLE) % _BINS] += 1
            found += 1
    middle, wanted = _bin_of(bins, wanted)
    fill(bins, 0)
    for i in range(found):
        if (near[i] >> _MIDDLE) % _BINS == middle:
            bins[near[i] % (1 << _MIDDLE)] += 1
    low, wanted = _bin_of(bins, wanted)
    least = (high << _HIGH) + (middle << _MIDDLE) + low
    out = view(task.out + token * task.token_bytes + head * task.head_bytes, task.wanted, np.float32)
    taken = 0
    for j in range(count):
        key = _ordered(bits[j])
        if key > least or (key == least and wanted > 0):
            wanted -= key == least
            out[taken] = np.float32(j)
            taken += 1


take_largest = TaskKernel(_take, LARGEST)
