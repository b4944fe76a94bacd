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
from .trellis_search import prepare, search

BLOCK = 32
SUPERBLOCK = 256
_TINY = np.float32(1e-30)
_FLOOR = np.float32(1e-6)  # of a block's mean weight: below it weights are raised to it
_DEAD = np.float32(1e-9)  # of a row's mean weight: blocks of less have no say ...
_INSTEAD = np.float32(1e-4)  # ... and are fitted with this share of it
_VARIANCE = np.float32(1365)  # of the codebooks' values
_UNITS = 16  # units that are tried for a row


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
def _fitting_scale(x, w, size, power, ratio):
    """(scale that fits a block, weight of deviations from it)."""
    total = moment = np.float32(0)
    for start in range(0, x.size, size):
        weight = square = np.float32(0)
        for i in range(start, start + size):
            weight += w[i]
            square += x[i] * x[i]
        square /= np.float32(size) * _VARIANCE
        total += weight
        moment += weight * square**power
    return (ratio * moment / total) ** (np.float32(0.5) / power), total


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
def _window(levels, target, tries, stride):
    """Index of the first of `tries` levels, `stride` apart, around the target (levels: magnitudes, ascending)."""
    i = min(max(np.searchsorted(levels, target), 1), levels.size - 1)
    place = i - 1 + (target - levels[i - 1]) / (levels[i] - levels[i - 1])
    first = np.int64(np.rint(min(max(place, np.float32(-9)), np.float32(levels.size)) - stride * (tries - 1) / 2))
    return min(max(first, 0), levels.size - 1 - stride * (tries - 1))


@kernel
def fit_rows(
    x, importance, size, trees, values, orders, levels, magnitudes, ends, signs, centers, tries, stride, share, expected, power, ratio, zero,
    sides, picks, indices, d,
):  # fmt: skip
    """Fits all rows of x (float32 [rows, n], C-contiguous).

    importance   float32 [1 or rows, n], or of no rows
    trees        (boxes, levels, tops, vectors) of two codebooks; values, orders: of both
    levels       float32 [sides, levels]: scales that can be stored over the row's unit, magnitudes, ascending; of one sign and
                 codebook per side; signs: float32 [sides], its half of sides with the second codebook if there are two
    magnitudes   float32: those of all levels, ascending; ends: (lowest, highest) that the largest block may get
    centers, tries, stride     how many levels per side are tried, and their distance
    share, expected   see `search`; ratio: of the square and the constant term of expected, as far as scales go
    zero         whether blocks of zeros need no search
    sides, picks uint8 [rows, blocks], out: the side and the level chosen
    indices      int32 [rows, groups], out: vectors; d: float32 [rows], out: the unit, refitted
    """
    rows, n = x.shape
    groups = BLOCK // size
    runs = orders.shape[1] // 16
    stretch = np.empty((groups, size // 2), np.int32)
    squares, products = np.empty_like(stretch), np.empty_like(stretch)
    facts = np.empty((groups, 5), np.float32)
    place = np.empty(size // 2, np.int32)
    lists, sums = np.empty((2, runs + 64), np.int64), np.empty((2, 16 * runs), np.float32)
    scales, scores = np.empty(tries, np.float32), np.empty(tries, np.float32)
    found = np.empty((tries, groups), np.int32)
    w = np.empty(n, np.float32)
    fits, says = np.empty(n // BLOCK, np.float32), np.empty(n // BLOCK, np.float32)
    for r in range(rows):
        _weigh(x[r], importance[r % max(importance.shape[0], 1)] if importance.shape[0] else x[r, :0], w)
        for b in range(n // BLOCK):
            part = slice(b * BLOCK, b * BLOCK + BLOCK)
            fits[b], says[b] = _fitting_scale(x[r, part], w[part], size, power, ratio)
        unit = _row_unit(fits, says, magnitudes, ends[0], ends[1])
        if not unit > 0:
            d[r] = 0
            sides[r], picks[r], indices[r] = 0, 0, 0
            continue
        sxq = sqq = 0.0
        for b in range(n // BLOCK):
            xb, wb = x[r, b * BLOCK : b * BLOCK + BLOCK], w[b * BLOCK : b * BLOCK + BLOCK]
            sides[r, b], picks[r, b] = 255, 0
            out = indices[r, b * groups : b * groups + groups]
            if fits[b] == 0 and zero:
                out[:] = 0
                continue
            prepare(xb, wb, size, stretch, squares, products, facts)
            best = np.float32(np.inf)
            for side in range(signs.size):
                start = _window(levels[side], fits[b] / unit, tries * centers, stride)
                for c in range(centers):
                    first = start + c * tries * stride
                    for k in range(tries):
                        scales[k] = signs[side] * levels[side, first + stride * k] * unit
                    center = (scales[0] + scales[tries - 1]) / 2
                    tree = trees[0] if 2 * side < signs.size or signs.size < 4 else trees[1]
                    search(xb, size, stretch, squares, products, facts, center, scales, share, expected, tree, place, lists, sums,
                           scores, found)  # fmt: skip
                    for k in range(tries):
                        if scores[k] < best:
                            best = scores[k]
                            sides[r, b], picks[r, b] = side, first + stride * k
                            out[:] = found[k]
            second = 1 if signs.size == 4 and sides[r, b] >= 2 else 0
            level = signs[sides[r, b]] * levels[sides[r, b], picks[r, b]]
            for g in range(groups):
                out[g] = orders[second, out[g]]
                for j in range(size):
                    i = g * size + j
                    q = level * values[second, out[g], j]
                    sxq += wb[i] * q * xb[i]
                    sqq += wb[i] * q * q
        d[r] = sxq / sqq if sqq > 0 else unit
