"""Fitting rows to the trellis types: the row's unit, a scale level for every 32 weights, a codebook vector for every group.

Spec D.7 tells what the reference does: it searches each block at a few scales, refits them, rounds them to levels and searches
again. Here only scales that can be stored are searched: the error of a block at scale s is, on average over its groups of mean
square rho * s^2 * variance, a polynomial of second degree in rho, of which the fitting s is known in closed form. From
that come the row's unit and the few levels of each sign near a block's s that are then tried with all their luck.
"""

from __future__ import annotations

import numpy as np

from ..formats.kernels import kernel
from .arithmetic import fma
from .lanes import LANES
from .trellis_search import BLOCK, FACTS, best_vectors, gather, least_error, prepare

SUPERBLOCK = 256
_TINY = np.float32(1e-30)
_FLOOR = np.float32(1e-6)  # of a block's mean weight: below it weights are raised to it
_DEAD = np.float32(1e-9)  # of a row's mean weight: blocks of less have no say ...
_INSTEAD = np.float32(1e-4)  # ... and are fitted with this share of it
_VARIANCE = np.float32(1365)  # of the codebooks' values
_UNITS = 16  # units that are tried for a row
_LARGE = np.float32(0.75)  # of the largest fitting scale: blocks of more are fitted with care, as they set the unit


@kernel
def _weigh(x, v, w):
    """Weights of squared errors of a row (float32 [n]; v of no elements: no importance), all above 0."""
    n = x.size
    total = np.float32(0)
    for start in range(0, n, SUPERBLOCK):
        squares = np.float32(0)
        for i in range(start, start + SUPERBLOCK):
            squares = fma(x[i], x[i], squares)
        sigma2 = 2 * squares / np.float32(SUPERBLOCK)
        if v.size:
            for i in range(start, start + SUPERBLOCK):
                w[i] = v[i] * np.sqrt(fma(x[i], x[i], sigma2))
        else:
            for i in range(start, start + SUPERBLOCK):
                w[i] = fma(x[i], x[i], np.float32(0.25) * sigma2)
        for i in range(start, start + SUPERBLOCK):
            total += w[i]
    mean = total / np.float32(n)
    for start in range(0, n, BLOCK):
        part = np.float32(0)
        for i in range(start, start + BLOCK):
            part += w[i]
        part /= np.float32(BLOCK)
        if part <= max(_DEAD * mean, _TINY):
            w[start : start + BLOCK] = max(_INSTEAD * mean, _TINY)
        else:
            for i in range(start, start + BLOCK):
                w[i] = max(w[i], _FLOOR * part)


@kernel
def _fitting_scale(x, w, start, size, factor):
    """(scale that fits the block from `start` on, weight of deviations from it)."""
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


@kernel
def _lowest_point(errors, places):
    """Where the errors (float32 [4 or more]) at these places, smoothed over three, are lowest."""
    best, least = 1, np.float32(np.inf)
    for k in range(1, errors.size - 1):
        smooth = errors[k]
        if smooth < least:
            best, least = k, smooth
    return places[best]


@kernel
def _row_unit(scales, weights, magnitudes, lowest, highest):
    """The unit d for which magnitudes * d (float32, ascending) come nearest to the blocks' scales, the largest of which
    becomes lowest ... highest times d."""
    largest = scales.max()
    unit, least = largest / highest, np.float32(np.inf)
    for t in range(_UNITS):
        d = largest / (lowest + (highest - lowest) * np.float32(t / (_UNITS - 1)))
        cost = np.float32(0)
        i = 0
        for b in range(scales.size):
            s = scales[b]
            if s > 0:
                i = np.searchsorted(magnitudes, s / d)
                nearest = np.float32(np.inf)
                for k in range(max(i - 1, 0), min(i + 1, magnitudes.size)):
                    q = s / (d * magnitudes[k])
                    nearest = min(nearest, q * q + 1 / (q * q) - 2)
                cost += weights[b] * s * s * nearest
        if cost < least:
            least, unit = cost, d
    return unit


@kernel
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


@kernel
def fit_rows(
    x, importance, size, boxes, starts, tops, vectors, values, orders, levels, signs, books, magnitudes, ends, steps, survey, share,
    expected, factor, zero, sides, picks, indices, d,
):  # fmt: skip
    """Fits all rows of x (float32 [rows, n], C-contiguous).

    importance   float32 [1 or rows, n], or of no rows
    size         8 or 4: the length of a group
    boxes, starts, tops, vectors   of two Books, one after the other; values, orders: [2, vectors, size], [2, vectors]
    levels       float32 [sides, levels]: scales that can be stored over the row's unit, magnitudes, ascending; of one sign and
                 codebook per side; signs: float32 [sides]; books: int64 [sides], 0 or 1
    magnitudes   float32: those of all levels, ascending; ends: (lowest, highest) that the largest block may get
    steps        float32 [centers, tries]: what the fitting scale is multiplied by for the levels tried, ascending
    survey       float32 [any]: what the fitting scale is multiplied by to find a better one first, in even ratios
    share, expected   see `gather`; factor: see `_fitting_scale`
    zero         whether blocks of zeros need no search
    sides, picks uint8 [rows, blocks], out: the side and the level chosen; side 255: zeros
    indices      int32 [rows * groups], out: vectors; d: float32 [rows], out: the unit, refitted
    """
    rows, n = x.shape
    blocks, groups = n // BLOCK, BLOCK // size
    most = orders.shape[1] // LANES
    stretch, squares = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32)
    products, place = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.int32)
    facts, limits, best_lanes = np.empty(groups * FACTS, np.float32), np.empty(groups, np.float32), np.empty(groups * LANES, np.float32)
    todo, counts = np.empty(groups, np.int64), np.empty(groups, np.int64)
    lists = np.empty(2 * (groups * most + LANES), np.int32)
    runs, sums = np.empty(groups * most, np.int32), np.empty(groups * most * 2 * LANES, np.float32)
    tries = steps.shape[1]
    errors = np.empty(survey.size, np.float32)
    scales, chosen = np.empty(tries, np.float32), np.empty(tries, np.int64)
    w = np.empty(n, np.float32)
    bits = w.view(np.int32)
    fits, says = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for r in range(rows):
        row = x[r]
        _weigh(row, importance[r % max(importance.shape[0], 1)] if importance.shape[0] else row[:0], w)
        for b in range(blocks):
            fits[b], says[b] = _fitting_scale(row, w, b * BLOCK, size, factor)
        largest = fits.max()
        if survey.size and largest > 0:
            for b in range(blocks):
                if fits[b] > _LARGE * largest:
                    start = b * BLOCK
                    prepare(row, w, bits, start, size, stretch, squares, products, facts)
                    gather(row, start, size, stretch, squares, products, facts, fits[b], share, expected, boxes, starts, 0,
                           tops, vectors, place, limits, best_lanes, todo, lists, counts, runs, sums)  # fmt: skip
                    for k in range(survey.size):
                        errors[k] = least_error(fits[b] * survey[k], groups, counts, sums)
                    fits[b] *= _lowest_point(errors, survey)
        unit = _row_unit(fits, says, magnitudes, ends[0], ends[1])
        if not unit > 0:
            d[r] = 0
            sides[r], picks[r], indices[r * blocks * groups : (r + 1) * blocks * groups] = 255, 0, 0
            continue
        sxq = sqq = 0.0
        for b in range(blocks):
            start, first_index = b * BLOCK, (r * blocks + b) * groups
            best_side, best_level = 255, 0
            if fits[b] == 0 and zero:
                indices[first_index : first_index + groups] = 0
                sides[r, b], picks[r, b] = best_side, best_level
                continue
            prepare(row, w, bits, start, size, stretch, squares, products, facts)
            best = np.float32(np.inf)
            for side in range(signs.size):
                last = -1
                for c in range(steps.shape[0]):
                    count = 0
                    for k in range(tries):
                        level = _nearest_level(levels, side, fits[b] / unit * steps[c, k])
                        if level > last:
                            last = level
                            chosen[count] = level
                            scales[count] = signs[side] * levels[side, level] * unit
                            count += 1
                    if count == 0:
                        continue
                    center = (scales[0] + scales[count - 1]) / 2
                    gather(row, start, size, stretch, squares, products, facts, center, share, expected, boxes, starts,
                           books[side], tops, vectors, place, limits, best_lanes, todo, lists, counts, runs, sums)  # fmt: skip
                    pick = -1
                    for k in range(count):
                        score = least_error(scales[k], groups, counts, sums)
                        if score < best:
                            best, pick = score, k
                    if pick >= 0:
                        best_side, best_level = side, chosen[pick]
                        best_vectors(scales[pick], groups, counts, runs, sums, indices, first_index)
            sides[r, b], picks[r, b] = best_side, best_level
            book = books[best_side]
            level = signs[best_side] * levels[best_side, best_level]
            for g in range(groups):
                index = orders[book, indices[first_index + g]]
                indices[first_index + g] = index
                for j in range(size):
                    i = start + g * size + j
                    q = level * values[book, index, j]
                    sxq += w[i] * q * row[i]
                    sqq += w[i] * q * q
        d[r] = sxq / sqq if sqq > 0 else unit
