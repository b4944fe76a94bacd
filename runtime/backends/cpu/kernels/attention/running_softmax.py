"""The softmax of attention while keys come in blocks: scores to weights under a maximum that grows, and sums scaled with it."""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.exponential import exp, exp_lanes
from ......simd.lanes import LANES, load, max_lanes, reduce_max, reduce_sum, splat, store
from ......simd.memory import fill, view
from .shared_values import KEYS
from .tiles import soft_cap

LOWEST = np.float32(-1e30)  # below any score, and finite: its difference to itself is 0


@kernel
def round_up(n, unit):
    return (n + unit - 1) // unit * unit


@kernel
def clear(maxima_at, sums_at, rows, values_at, count):
    """Sets the sums of rows, and so many of their values, to those before the first key."""
    fill(view(maxima_at, rows, np.float32), LOWEST)
    fill(view(sums_at, rows, np.float32), 0)
    fill(view(values_at, count, np.float32), 0)


@kernel
def first_key(position, window):
    """The first key that the query of a position sees."""
    if window < 0:
        return position // -window * -window
    return max(0, position + 1 - window) if window else 0


@kernel
def change_scores(scores, skipped, rows, members, distance, count, softcap, slopes_at):
    """Scores of a block, as `exponentiate` takes them: softcap * tanh(score / softcap), less slope * distance.

    distance: of the first query's token from the first key, below 0 before it; slopes_at: of float32 [members], 0: none
    """
    slopes = view(slopes_at, members if slopes_at else 0, np.float32)
    for r in range(skipped, rows):
        at = r * KEYS
        if softcap != 0:
            for j in range(at, at + round_up(count, LANES), LANES):
                store(scores, j, soft_cap(load(scores, j), softcap))
        if slopes_at:
            slope, own = slopes[r % members], distance + r // members
            for j in range(count):
                scores[at + j] -= slope * np.float32(abs(own - j))


@kernel
def hide(scores, skipped, rows, members, seen_at, step, count):
    """Scores of a block, as `exponentiate` takes them, of keys that a query's token does not see: -inf. seen_at: of uint8
    [count], 0 for such a key, of the first token, the next one's `step` bytes on."""
    for r in range(skipped, rows):
        seen, of_row = view(seen_at + r // members * step, count, np.uint8), scores[r * KEYS : r * KEYS + count]
        for j in range(count):
            of_row[j] = of_row[j] if seen[j] else np.float32(-np.inf)


@kernel
def exponentiate(scores, skipped, rows, members, position, window, key, count, maxima, sums, values, width):
    """Replaces the scores of a block, rows of KEYS numbers, by exp(score - running maximum of the row), 0 where a query does
    not see a key; scales the row's sum, and its `width` sums of values, to that maximum.

    skipped: so many rows from the first on see no key of the block, and are left as they are; position: of the last key that
    the first query sees, were there so many; members: rows per token; the keys are key ... key + count - 1; values: float32,
    rows of `width`.
    """
    padded = round_up(count, LANES)
    for r in range(skipped, rows):
        at, own = r * KEYS, position + r // members
        end = min(own + 1 - key, count)
        begin = max(first_key(own, window) - key, 0)
        if end <= begin:
            for j in range(0, padded, LANES):
                store(scores, at + j, splat(0))
            continue
        for j in range(begin):
            scores[at + j] = -np.inf
        whole = round_up(end, LANES)
        for j in range(end, whole):
            scores[at + j] = -np.inf
        for j in range(whole, padded, LANES):
            store(scores, at + j, splat(0))
        lane_maxima = splat(LOWEST)
        for j in range(0, whole, LANES):
            lane_maxima = max_lanes(load(scores, at + j), lane_maxima)
        before = maxima[r]
        maximum = max(before, reduce_max(lane_maxima))
        lane_sums = splat(0)
        for j in range(0, whole, LANES):
            weights = exp_lanes(load(scores, at + j) - maximum)
            store(scores, at + j, weights)
            lane_sums = lane_sums + weights
        maxima[r] = maximum
        if maximum != before and before != LOWEST:  # of a row without keys so far the sums are 0
            factor = exp(before - maximum)
            sums[r] *= factor
            for j in range(r * width, (r + 1) * width, LANES):
                store(values, j, load(values, j) * factor)
        sums[r] += reduce_sum(lane_sums)
