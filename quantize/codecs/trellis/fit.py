"""Fitting rows to the trellis types: the row's scale d, a scale level for every 32 weights, a codebook vector for every group.

ik_llama.cpp searches each block at a few scales, refits them, quantises them to levels and searches again
(docs/formats/encoders.md, trellis types). Here mostly scales that can be stored are searched: a power mean of a block's
weights, and of the squares of their groups, predicts the scale that fits it within 15 %; from these predictions follow the
row's scale and the few levels of each sign that are tried. Only the largest blocks, on which the row's scale depends, are
searched at some scales first.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES
from ....simd.scalar import fma
from .nearest_search import BLOCK, FACTS, best_vectors, find_near_vectors, least_error, prepare

SUPERBLOCK = 256
_TINY = np.float32(1e-30)
_FLOOR = np.float32(1e-6)  # of a block's mean weight: below it weights are raised to it
_DEAD = np.float32(1e-9)  # of a row's mean weight: blocks of less have no say
_UNITS = 8  # units that are tried for a row
_HEAVY = np.float32(3)  # times the usual weight of a block in the error: more is tried for such blocks
_LARGE = np.float32(0.75)  # of the largest fitting scale: blocks of more are fitted with care, as they set the unit


@kernel(error_model="numpy")
def _error_weights(x, qw, w, has_weight):
    """Weights of squared errors of a row (float32 [n]; qw of no elements: no importance), all above 0.

    has_weight: bool [n / 32], out: whether a block influences the row's scale. Those that do not are fitted last, with equal
    weights (ik_llama.cpp gives them 1e-4 and lets them take part).
    """
    n = x.size
    sum_w = np.float32(0)
    for start in range(0, n, SUPERBLOCK):
        squares = np.float32(0)
        for i in range(start, start + SUPERBLOCK):
            squares = fma(x[i], x[i], squares)
        sigma2 = 2 * squares / np.float32(SUPERBLOCK)
        if qw.size:
            for i in range(start, start + SUPERBLOCK):
                w[i] = qw[i] * np.sqrt(fma(x[i], x[i], sigma2))
        else:
            for i in range(start, start + SUPERBLOCK):
                w[i] = fma(x[i], x[i], np.float32(0.25) * sigma2)
        for i in range(start, start + SUPERBLOCK):
            sum_w += w[i]
    mean = sum_w / np.float32(n)
    for b in range(n // BLOCK):
        block_mean = np.float32(0)
        for i in range(b * BLOCK, b * BLOCK + BLOCK):
            block_mean += w[i]
        block_mean /= np.float32(BLOCK)
        has_weight[b] = mean <= _TINY or block_mean > _DEAD * mean
        for i in range(b * BLOCK, b * BLOCK + BLOCK):
            w[i] = max(w[i], _FLOOR * block_mean) if block_mean > max(_DEAD * mean, _TINY) else np.float32(1)


@kernel(error_model="numpy")
def _predicted_scale(x, w, start, size, factor):
    """(scale predicted to fit the block from `start` on, weight of deviations from it).

    The scale is `factor` times the weighted mean of the 6th power of x^2 + sum of x^2 over the group, to the power of 1 / 12:
    by experiment (exhaustive search at 40 scales) the best of several predictors, for all the types.
    """
    total = moment = largest = np.float32(0)
    for i in range(start, start + BLOCK):
        largest = max(largest, abs(x[i]))
        total += w[i]
    if largest < _TINY:
        return np.float32(0), total
    inverse = 1 / largest
    for first in range(start, start + BLOCK, size):
        square = np.float32(0)
        for i in range(first, first + size):
            square += (x[i] * inverse) ** 2
        for i in range(first, first + size):
            power = square + (x[i] * inverse) ** 2
            power = power * power * power
            moment += w[i] * power * power
    return factor * largest * (moment / total) ** np.float32(1 / 12), total


@kernel(error_model="numpy")
def _least_error_factor(errors, places):
    """The factor where the errors (float32 [3 or more]) are least, the ends excepted."""
    best, least = 1, np.float32(np.inf)
    for k in range(1, errors.size - 1):
        if errors[k] < least:
            best, least = k, errors[k]
    return places[best]


@kernel(error_model="numpy")
def _largest_scale(scales, weights):
    """The largest scale with a weight above 0."""
    largest = np.float32(0)
    for b in range(scales.size):
        if weights[b] > 0:
            largest = max(largest, scales[b])
    return largest


@kernel(error_model="numpy")
def _row_scale(scales, weights, largest, magnitudes, lowest, highest):
    """The row scale d for which magnitudes * d (float32, ascending) come nearest to the blocks' scales.

    The largest of these that has a weight becomes `lowest` ... `highest` times d.
    """
    unit, least = largest / highest, np.float32(np.inf)
    for t in range(_UNITS):
        d = largest / (lowest + (highest - lowest) * np.float32(t / (_UNITS - 1)))
        cost = np.float32(0)
        i = 0
        for b in range(scales.size):
            s = scales[b]
            if s > 0 and weights[b] > 0:
                i = np.searchsorted(magnitudes, s / d)
                nearest = np.float32(np.inf)
                for k in range(max(i - 1, 0), min(i + 1, magnitudes.size)):
                    q = max(s / (d * magnitudes[k]), _FLOOR)
                    nearest = min(nearest, q * q + 1 / (q * q) - 2)
                cost += weights[b] * s * s * nearest
        if cost < least:
            least, unit = cost, d
    return unit


@kernel(error_model="numpy")
def _nearest_level(levels, side, target):
    """Index of the level of a side nearest to the target by ratio (levels: magnitudes, ascending)."""
    low, high = 0, levels.shape[1] - 1
    while low < high:
        middle = (low + high) // 2
        if levels[side, middle] < target:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 0 and target * target < levels[side, low] * levels[side, low - 1] else low


@kernel(error_model="numpy")
def fit_rows(
    x, importance, size, boxes, starts, tops, vectors, values, orders, levels, signs, books, magnitudes, ends, steps, more,
    survey, share, expected, factor, zero, sides, picks, indices, d,
):  # fmt: skip
    """Fits all rows of x (float32 [rows, n], C-contiguous). A side is a sign with a codebook; each has its own levels.

    importance   float32 [1 or rows, n], or of no rows
    size         8 or 4: elements of a group
    boxes, starts, tops, vectors   of the TrellisCodebooks, concatenated; values: [books, vectors, size];
                 orders: [books, vectors]
    levels       float32 [sides, levels]: block scales that can be stored, over the row's scale: magnitudes, ascending;
                 signs: float32 [sides]; books: int64 [sides], 0 or 1
    magnitudes   float32: those of all levels, ascending; ends: (lowest, highest) for the largest block
    steps        float32 [centers, tries]: factors on the predicted scale for the levels tried, ascending;
                 more: the same for blocks of large weight
    survey       float32 [any]: factors on the predicted scale of large blocks to find a better one first, in geometric sequence
    share, expected   see `find_near_vectors`; factor: see `_predicted_scale`
    zero         whether blocks can be stored as zeros
    sides, picks uint8 [rows, blocks], out: the side and the level chosen; side 255: zeros
    indices      int32 [rows * groups], out: vectors; d: float32 [rows], out: the row scale, refitted
    """
    rows, n = x.shape
    blocks, groups = n // BLOCK, BLOCK // size
    most = orders.shape[1] // LANES
    stretch, squares = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32)
    products, place = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32)
    facts, limits = np.empty(groups * FACTS, np.float32), np.empty(groups, np.float32)
    best_lanes = np.empty(groups * LANES, np.float32)
    todo, counts = np.empty(groups, np.int64), np.empty(groups, np.int64)
    lists = np.empty(2 * (groups * most + LANES), np.int32)
    runs, sums = np.empty(groups * most, np.int32), np.empty(groups * most * 2 * LANES, np.float32)
    tries = max(steps.shape[1], more.shape[1])
    errors = np.empty(survey.size, np.float32)
    scales, chosen = np.empty(tries, np.float32), np.empty(tries, np.int64)
    w = np.empty(n, np.float32)
    bits = w.view(np.int32)
    has_weight = np.empty(blocks, np.bool_)
    block_scales, block_weights = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for r in range(rows):
        row = x[r]
        _error_weights(row, importance[r % max(importance.shape[0], 1)] if importance.shape[0] else row[:0], w, has_weight)
        for b in range(blocks):
            block_scales[b], block_weights[b] = _predicted_scale(row, w, b * BLOCK, size, factor)
        if _largest_scale(block_scales, block_weights * has_weight) > 0:
            block_weights *= has_weight
        else:  # all that is not zero has no say: then it has to have one
            has_weight[:] = True
        largest = _largest_scale(block_scales, block_weights)
        if survey.size and largest > 0:
            for b in range(blocks):
                if block_scales[b] > _LARGE * largest and has_weight[b]:
                    start = b * BLOCK
                    prepare(row, w, bits, start, size, stretch, squares, products, facts)
                    find_near_vectors(
                        row, start, size, stretch, squares, products, facts, block_scales[b], share, expected, boxes, starts, 0,
                        tops, vectors, place, limits, best_lanes, todo, lists, counts, runs, sums,
                    )  # fmt: skip
                    for k in range(survey.size):
                        errors[k] = least_error(block_scales[b] * survey[k], groups, counts, sums)
                    block_scales[b] *= _least_error_factor(errors, survey)
            largest = _largest_scale(block_scales, block_weights)
        unit = _row_scale(block_scales, block_weights, largest, magnitudes, ends[0], ends[1])
        if not unit > 0:
            d[r] = 0
            sides[r], picks[r], indices[r * blocks * groups : (r + 1) * blocks * groups] = 255, 0, 0
            continue
        usual = np.float32(0)
        for b in range(blocks):
            usual += block_weights[b] * block_scales[b] * block_scales[b]
        usual /= np.float32(blocks)
        sxq = sqq = 0.0
        for b in range(blocks):
            start, first_index = b * BLOCK, (r * blocks + b) * groups
            best_side, best_level = 255, 0
            if block_scales[b] == 0 and zero:
                indices[first_index : first_index + groups] = 0
                sides[r, b], picks[r, b] = best_side, best_level
                continue
            prepare(row, w, bits, start, size, stretch, squares, products, facts)
            best = np.float32(np.inf)
            factors = more if block_weights[b] * block_scales[b] * block_scales[b] > _HEAVY * usual else steps
            for side in range(signs.size):
                last = -1
                for c in range(factors.shape[0]):
                    count = 0
                    for k in range(factors.shape[1]):
                        level = _nearest_level(levels, side, block_scales[b] / unit * factors[c, k])
                        if level > last:
                            last = level
                            chosen[count] = level
                            scales[count] = signs[side] * levels[side, level] * unit
                            count += 1
                    if count == 0:
                        continue
                    center = (scales[0] + scales[count - 1]) / 2
                    find_near_vectors(
                        row, start, size, stretch, squares, products, facts, center, share, expected, boxes, starts,
                        books[side], tops, vectors, place, limits, best_lanes, todo, lists, counts, runs, sums,
                    )  # fmt: skip
                    pick = -1
                    for k in range(count):
                        score = least_error(scales[k], groups, counts, sums)
                        if score < best:
                            best, pick = score, k
                    if pick >= 0:
                        best_side, best_level = side, chosen[pick]
                        best_vectors(scales[pick], groups, counts, runs, sums, indices, first_index)
            if zero and best >= 0:
                best_side, best_level = 255, 0
                indices[first_index : first_index + groups] = 0
            sides[r, b], picks[r, b] = best_side, best_level
            if best_side == 255:
                continue
            book = books[best_side]
            say = np.float32(1) if has_weight[b] else np.float32(0)
            level = signs[best_side] * levels[best_side, best_level]
            for g in range(groups):
                index = orders[book, indices[first_index + g]]
                indices[first_index + g] = index
                for j in range(size):
                    i = start + g * size + j
                    q = level * values[book, index, j]
                    sxq += say * w[i] * q * row[i]
                    sqq += say * w[i] * q * q
        d[r] = sxq / sqq if sqq > 0 else unit
