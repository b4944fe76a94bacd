"""Fits rows to the trellis types: a scale d per row, a multiple of it per 32 weights, and a codebook vector per group.

ik_llama.cpp searches each block at a few scales, refits them, quantises them and searches again (docs/formats/encoders.md,
trellis types). Here mostly scales that can be stored are searched: a power mean of a block's weights, and of the squares of
their groups, predicts the scale that fits it within 15 %; from these predictions follow the row's scale and the few multiples
of each sign that are tried. Only the blocks of largest scale, on which the row's scale depends, are searched at other scales
first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES
from ....simd.scalar import fma
from .codebook import TrellisTree
from .nearest_search import BLOCK, best_vectors, find_near_vectors, least_error, new_block_search, prepare_block

SUPERBLOCK = 256
_TINY = np.float32(1e-30)
_MIN_WEIGHT = np.float32(1e-6)  # of a block's mean weight: smaller weights are raised to it
_MIN_BLOCK_WEIGHT = np.float32(1e-9)  # of a row's mean weight: blocks of less have no influence on the row's scale
_MIN_RATIO = np.float32(1e-6)  # of a block's scale to a multiple of the row's scale
_ROW_SCALE_TRIALS = 8
_HEAVY_BLOCK = np.float32(3)  # times the mean weight of blocks in the error: more multiples are tried for such blocks
_LARGE_SCALE = np.float32(0.75)  # of the largest predicted scale: larger ones are refined, as they set the row's scale

NO_VARIANT = 255  # in place of a variant: a block of zeros


@kernel
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
        has_weight[b] = mean <= _TINY or block_mean > _MIN_BLOCK_WEIGHT * mean
        usable = block_mean > max(_MIN_BLOCK_WEIGHT * mean, _TINY)
        for i in range(b * BLOCK, b * BLOCK + BLOCK):
            w[i] = max(w[i], _MIN_WEIGHT * block_mean) if usable else np.float32(1)


@kernel
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


@kernel
def _least_error_factor(errors, factors):
    """The factor of least error, the first and the last excepted; both float32 [3 or more]."""
    best, least = 1, np.float32(np.inf)
    for k in range(1, errors.size - 1):
        if errors[k] < least:
            best, least = k, errors[k]
    return factors[best]


@kernel
def _largest_scale(scales, weights):
    """The largest scale with a weight above 0."""
    largest = np.float32(0)
    for b in range(scales.size):
        if weights[b] > 0:
            largest = max(largest, scales[b])
    return largest


@kernel
def _row_scale(scales, weights, largest, magnitudes, lowest, highest):
    """The row scale d for which magnitudes * d (float32, ascending) come nearest to the blocks' scales.

    `largest`, the largest of these that has a weight, becomes `lowest` ... `highest` times d.
    """
    best, least = largest / highest, np.float32(np.inf)
    for t in range(_ROW_SCALE_TRIALS):
        d = largest / (lowest + (highest - lowest) * np.float32(t / (_ROW_SCALE_TRIALS - 1)))
        cost = np.float32(0)
        i = 0
        for b in range(scales.size):
            s = scales[b]
            if s > 0 and weights[b] > 0:
                i = np.searchsorted(magnitudes, s / d)
                nearest = np.float32(np.inf)
                for k in range(max(i - 1, 0), min(i + 1, magnitudes.size)):
                    q = max(s / (d * magnitudes[k]), _MIN_RATIO)
                    nearest = min(nearest, q * q + 1 / (q * q) - 2)
                cost += weights[b] * s * s * nearest
        if cost < least:
            least, best = cost, d
    return best


@kernel
def _nearest_multiple(multiples, variant, target):
    """Index of the multiple of a variant nearest to the target by ratio (multiples: magnitudes, ascending)."""
    low, high = 0, multiples.shape[1] - 1
    while low < high:
        middle = (low + high) // 2
        if multiples[variant, middle] < target:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 0 and target * target < multiples[variant, low] * multiples[variant, low - 1] else low


class TrellisSearch(NamedTuple):
    """What the rows of a type are fitted with. A variant is a sign with a codebook, which has its own multiples.

    size          8 or 4: elements of a group
    tree          of its codebooks; values: int8 [codebooks, vectors, size]; orders: int32 [codebooks, vectors]
    multiples     float32 [variants, count]: block scales that can be stored, over the row's scale: magnitudes, ascending
    signs         float32 [variants]; codebooks: int64 [variants], 0 or 1
    magnitudes    float32: those of all multiples, ascending
    lowest, highest  the multiple that the block of largest scale may get
    trial_factors float32 [centers, tries]: factors on the predicted scale for the multiples tried, ascending;
                  heavy_trial_factors: the same for blocks of large weight
    refine_factors  float32 [any]: factors on the predicted scale of large blocks, a geometric sequence, of which the best is
                  taken first
    prediction_factor  see `_predicted_scale`
    has_zero      whether blocks can be stored as zeros
    """

    size: int
    tree: TrellisTree
    values: np.ndarray
    orders: np.ndarray
    multiples: np.ndarray
    signs: np.ndarray
    codebooks: np.ndarray
    magnitudes: np.ndarray
    lowest: np.float32
    highest: np.float32
    trial_factors: np.ndarray
    heavy_trial_factors: np.ndarray
    refine_factors: np.ndarray
    prediction_factor: np.float32
    has_zero: bool


class TrellisFit(NamedTuple):
    """What `fit_rows` has found.

    variants, multiple_indices  uint8 [rows, blocks]: the variant, or NO_VARIANT for zeros, and the index of its multiple
    indices                     int32 [rows * groups]: vectors
    d                           float32 [rows]: the row scale, refitted
    """

    variants: np.ndarray
    multiple_indices: np.ndarray
    indices: np.ndarray
    d: np.ndarray


@kernel
def fit_rows(x, importance, search, found):
    """Fits all rows of x (float32 [rows, n], C-contiguous); importance: float32 [1 or rows, n], or of no rows.

    search: TrellisSearch; found: TrellisFit, out
    """
    size, tree, values, orders, multiples, signs = (
        search.size, search.tree, search.values, search.orders, search.multiples, search.signs
    )  # fmt: skip
    trial_factors, heavy_trial_factors, refine_factors = (
        search.trial_factors, search.heavy_trial_factors, search.refine_factors
    )  # fmt: skip
    variants, multiple_indices, indices, d = found
    rows, n = x.shape
    blocks, groups = n // BLOCK, BLOCK // size
    block_search = new_block_search(size, orders.shape[1] // LANES)
    max_tries = max(trial_factors.shape[1], heavy_trial_factors.shape[1])
    errors = np.empty(refine_factors.size, np.float32)
    trial_scales, trial_indices = np.empty(max_tries, np.float32), np.empty(max_tries, np.int64)
    w = np.empty(n, np.float32)
    w_bits = w.view(np.int32)
    has_weight = np.empty(blocks, np.bool_)
    block_scales, block_weights = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for r in range(rows):
        row = x[r]
        _error_weights(row, importance[r % max(importance.shape[0], 1)] if importance.shape[0] else row[:0], w, has_weight)
        for b in range(blocks):
            block_scales[b], block_weights[b] = _predicted_scale(row, w, b * BLOCK, size, search.prediction_factor)
        if _largest_scale(block_scales, block_weights * has_weight) > 0:
            block_weights *= has_weight
        else:  # only blocks without influence are not zero: then all have influence
            has_weight[:] = True
        largest = _largest_scale(block_scales, block_weights)
        if refine_factors.size and largest > 0:
            for b in range(blocks):
                if block_scales[b] > _LARGE_SCALE * largest and has_weight[b]:
                    start = b * BLOCK
                    prepare_block(row, w, w_bits, start, size, block_search)
                    find_near_vectors(row, start, size, block_scales[b], tree, 0, block_search)
                    for k in range(refine_factors.size):
                        errors[k] = least_error(block_scales[b] * refine_factors[k], groups, block_search)
                    block_scales[b] *= _least_error_factor(errors, refine_factors)
            largest = _largest_scale(block_scales, block_weights)
        row_d = _row_scale(block_scales, block_weights, largest, search.magnitudes, search.lowest, search.highest)
        if not row_d > 0:
            d[r] = 0
            variants[r], multiple_indices[r], indices[r * blocks * groups : (r + 1) * blocks * groups] = NO_VARIANT, 0, 0
            continue
        mean_error_weight = np.float32(0)
        for b in range(blocks):
            mean_error_weight += block_weights[b] * block_scales[b] * block_scales[b]
        mean_error_weight /= np.float32(blocks)
        sxq = sqq = 0.0
        for b in range(blocks):
            start, first_index = b * BLOCK, (r * blocks + b) * groups
            best_variant, best_index = NO_VARIANT, 0
            if block_scales[b] == 0 and search.has_zero:
                indices[first_index : first_index + groups] = 0
                variants[r, b], multiple_indices[r, b] = best_variant, best_index
                continue
            prepare_block(row, w, w_bits, start, size, block_search)
            least = np.float32(np.inf)
            is_heavy = block_weights[b] * block_scales[b] * block_scales[b] > _HEAVY_BLOCK * mean_error_weight
            factors = heavy_trial_factors if is_heavy else trial_factors
            for variant in range(signs.size):
                last = -1
                for c in range(factors.shape[0]):
                    count = 0
                    for k in range(factors.shape[1]):
                        i = _nearest_multiple(multiples, variant, block_scales[b] / row_d * factors[c, k])
                        if i > last:
                            last = i
                            trial_indices[count] = i
                            trial_scales[count] = signs[variant] * multiples[variant, i] * row_d
                            count += 1
                    if count == 0:
                        continue
                    center = (trial_scales[0] + trial_scales[count - 1]) / 2
                    find_near_vectors(row, start, size, center, tree, search.codebooks[variant], block_search)
                    best_trial = -1
                    for k in range(count):
                        error = least_error(trial_scales[k], groups, block_search)
                        if error < least:
                            least, best_trial = error, k
                    if best_trial >= 0:
                        best_variant, best_index = variant, trial_indices[best_trial]
                        best_vectors(trial_scales[best_trial], groups, block_search, indices, first_index)
            if search.has_zero and least >= 0:
                best_variant, best_index = NO_VARIANT, 0
                indices[first_index : first_index + groups] = 0
            variants[r, b], multiple_indices[r, b] = best_variant, best_index
            if best_variant == NO_VARIANT:
                continue
            codebook = search.codebooks[best_variant]
            influence = np.float32(1) if has_weight[b] else np.float32(0)
            multiple = signs[best_variant] * multiples[best_variant, best_index]
            for g in range(groups):
                index = orders[codebook, indices[first_index + g]]
                indices[first_index + g] = index
                for j in range(size):
                    i = start + g * size + j
                    q = multiple * values[codebook, index, j]
                    sxq += influence * w[i] * q * row[i]
                    sqq += influence * w[i] * q * q
        d[r] = sxq / sqq if sqq > 0 else row_d
