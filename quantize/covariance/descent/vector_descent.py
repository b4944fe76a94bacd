"""Coordinate descent over vectors of weights: the entries of codebook and trellis types under a covariance.

With r = w - q, error r H r^T and gradient g = r H, moving the weights S of one vector by d changes the error by
d H_SS d^T - 2 d g_S. Without codes d = H_SS^-1 g_S would be best. Where signs are stored, those of q_S + d are taken; if they
are stored by eights with an even number of negative ones and their number would be odd, the sign that costs least is turned
around. Of the entries with these signs the one of least error is found by trying them, sixteen at a time: in units of the
factor f, and with H', g' for H_SS, g_S + q_S H_SS after the signs, the entry p has the error p H' p^T - 2 p g'^T / f.

Codebooks are tried as a whole. Of a trellis codebook those entries are tried that are near q_S + d when columns are weighted
by the diagonal of H. A vector changes only if that lowers the error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems, parameters_of
from ....simd.lanes import LANES, first_set_lane, fma_lanes, load, reduce_min, select, splat, store
from ...codecs.trellis.nearest_search import BLOCK, find_near_vectors, new_block_search, prepare_block
from ..coupling import mix, share_steps, take_row
from ..matrix.panels import add_products
from ..vectors import SIGNS_EVEN, SIGNS_IN_ENTRIES, VectorTable

MARGIN = np.float32(1e-6)  # of the error: less is no improvement but rounding


@kernel
def invert_diagonal_blocks(panels, size, width, inverses):
    """inverses (float32 [columns / width, width * width]) = those of the width x width blocks on the diagonal of H.

    panels: float32, flat: H, positive definite, in panels of `size` rows. Gauss-Jordan in float64.
    """
    a = np.empty((width, width))
    for v in range(inverses.shape[0]):
        at = v * width
        for i in range(width):
            for k in range(width):
                a[i, k] = panels[((at + k) // 64 * size + at + i) * 64 + (at + k) % 64]
        for p in range(width):
            pivot = 1 / a[p, p] if a[p, p] > 0 else 0.0
            a[p, p] = 1
            for k in range(width):
                a[p, k] *= pivot
            for i in range(width):
                if i != p:
                    factor = a[i, p]
                    a[i, p] = 0
                    for k in range(width):
                        a[i, k] -= factor * a[p, k]
        for i in range(width):
            for k in range(width):
                inverses[v, i * width + k] = a[i, k]


def _make_entry_search(width: int) -> Any:
    """(best_entry, squares_of_entries, best_of_squares) for vectors of `width` weights.

    lanes: as in `VectorTable`; quadratic: float32 [width * width], the diagonal of a matrix Q, twice Q below it.
    """

    @kernel
    def best_entry(quadratic, linear, lanes, runs, first, last, scratch):
        """The entry in runs[first ... last - 1] with the least p Q p^T + p l: (its number, that value)."""
        best, at = splat(np.inf), splat(0)
        for k in range(first, last):
            start = runs[k] * (width * LANES)
            total = splat(0)
            for i in range(width):
                inner = splat(linear[i])
                for j in range(i + 1):
                    inner = fma_lanes(splat(quadratic[i * width + j]), load(lanes, start + j * LANES), inner)
                total = fma_lanes(load(lanes, start + i * LANES), inner, total)
            better = total < best
            best, at = select(better, total, best), select(better, splat(np.float32(k)), at)
        least = reduce_min(best)
        store(scratch, 0, at)
        lane = first_set_lane(best == least) & (LANES - 1)
        return runs[np.intp(scratch[lane])] * LANES + lane, least

    @kernel
    def squares_of_entries(quadratic, lanes, count, squares, out):
        """squares[out ...] = p Q p^T of all entries, `count` runs."""
        for k in range(count):
            start = k * (width * LANES)
            total = splat(0)
            for i in range(width):
                inner = splat(0)
                for j in range(i + 1):
                    inner = fma_lanes(splat(quadratic[i * width + j]), load(lanes, start + j * LANES), inner)
                total = fma_lanes(load(lanes, start + i * LANES), inner, total)
            store(squares, out + k * LANES, total)

    @kernel
    def best_of_squares(squares, at_squares, linear, lanes, first, last, scratch):
        """As best_entry for the runs first ... last - 1, p Q p^T being at squares[at_squares + number of the entry]."""
        best, at = splat(np.inf), splat(0)
        for k in range(first, last):
            start = k * (width * LANES)
            total = load(squares, at_squares + k * LANES)
            for i in range(width):
                total = fma_lanes(load(lanes, start + i * LANES), splat(linear[i]), total)
            better = total < best
            best, at = select(better, total, best), select(better, splat(np.float32(k)), at)
        least = reduce_min(best)
        store(scratch, 0, at)
        lane = first_set_lane(best == least) & (LANES - 1)
        return np.intp(scratch[lane]) * LANES + lane, least

    return best_entry, squares_of_entries, best_of_squares


def _make_sweep(width: int) -> Any:
    """(sweep, tabulate) for vectors of `width` weights."""
    best_entry, squares_of_entries, best_of_squares = _make_entry_search(width)
    groups = BLOCK // width

    @kernel
    def sweep(
        coupling, active, factor, signs_stored, lanes, runs_per_vector, tree, panels, inverses, squares, size, gradient, values,
        entries, signs, changed, feedback,
    ):  # fmt: skip
        """One sweep over the vectors of the rows that are active; changed: int64 [rows], how many of each changed.

        coupling                `coupling.Coupling` of the rows
        factor, entries, signs  of `VectorRows`; values: float32 [rows, n], its values
        signs_stored            of `VectorTable`, as lanes
        runs_per_vector         how many runs, from the beginning of the vector's book on, are tried for it
        tree                    of the trellis type's codebooks; without boxes: all entries are tried
        panels, size, gradient  as for `descent.sweep`; inverses: of `invert_diagonal_blocks`
        squares                 of `tabulate`, where the signs are part of the entries, and all of these are tried
        feedback                whether panels are those of a `prepared.FeedbackMatrix`, which is zero left of the block, and
                                gradient is its product
        """
        rows, n = values.shape
        searched, tabulated = tree.boxes.size > 0, tree.boxes.size == 0 and signs_stored == SIGNS_IN_ENTRIES
        count_runs = lanes.size // (width * LANES)
        columns, steps, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
        buffer, quadratic, linear = np.empty(64, np.float32), np.zeros(width * width, np.float32), np.empty(width, np.float32)
        old, target, new_signs = np.empty(width, np.float32), np.empty(width, np.float32), np.ones(width, np.float32)
        scratch = np.empty(LANES, np.float32)
        mixed = np.empty(rows * 64, np.float32)
        runs = np.empty(count_runs, np.int32)
        for k in range(count_runs):
            runs[k] = k
        # of the tree search
        points, weights = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        bits, most = weights.view(np.int32), runs_per_vector if searched else 1
        near = new_block_search(width, most)
        near_counts, near_runs = near.counts, near.runs
        changed[:] = 0
        for first in range(0, n, 64):
            tile = (first // 64 * size + first) * 64
            mix(coupling, gradient, size, first, rows, mixed)
            for row in range(rows - 1, -1, -1):
                counts[row] = 0
                if not active[row]:
                    continue
                take_row(coupling, mixed, row, buffer)
                count = 0
                for at in range(0, min(64, n - first), width):
                    v = (first + at) // width
                    scale = factor[row, v]
                    if scale == 0:
                        continue
                    inverse, entry = 1 / scale, entries[row, v]
                    book = entry // (runs_per_vector * LANES)
                    if searched and at % BLOCK == 0:
                        for i in range(BLOCK):
                            j = i // width * width
                            step = np.float32(0)
                            for k in range(width):
                                step += inverses[(first + at + i) // width, i % width * width + k] * buffer[at + j + k]
                            point = values[row, first + at + i] + step
                            points[i] = point if signs_stored == SIGNS_IN_ENTRIES else abs(point)
                            weights[i] = panels[tile + (at + i) * 65]
                        prepare_block(points, weights, bits, 0, width, near)
                        find_near_vectors(points, 0, width, scale, tree, book, near)
                        for g in range(groups):
                            for i in range(g * most, g * most + near_counts[g]):
                                near_runs[i] += book * runs_per_vector
                    lane = entry // LANES * (width * LANES) + entry % LANES
                    for i in range(width):
                        old[i] = lanes[lane + i * LANES]
                        if signs_stored != SIGNS_IN_ENTRIES:
                            old[i] *= signs[row, first + at + i]
                    current = np.float32(0)
                    for i in range(width):
                        h = tile + (at + i) * 64 + at
                        product = np.float32(0)
                        for j in range(width):
                            product += panels[h + j] * old[j]
                        linear[i] = -2 * (product + buffer[at + i] * inverse)
                        current += old[i] * (product + linear[i])
                    if signs_stored != SIGNS_IN_ENTRIES:
                        weakest, weight, odd = 0, np.float32(np.inf), False
                        for i in range(width):
                            step = np.float32(0)
                            for j in range(width):
                                step += inverses[v, i * width + j] * buffer[at + j]
                            target[i] = old[i] + step * inverse
                            new_signs[i] = np.float32(-1) if target[i] < 0 else np.float32(1)
                            odd ^= new_signs[i] != signs[row, first + at + i]
                            cost = target[i] * target[i] * panels[tile + (at + i) * 65]
                            if cost < weight:
                                weakest, weight = i, cost
                        if odd and signs_stored == SIGNS_EVEN:
                            new_signs[weakest] = -new_signs[weakest]
                    if tabulated:
                        best, error = best_of_squares(
                            squares, v * count_runs * LANES, linear, lanes, book * runs_per_vector,
                            (book + 1) * runs_per_vector, scratch,
                        )  # fmt: skip
                    else:
                        for i in range(width):
                            h = tile + (at + i) * 64 + at
                            linear[i] *= new_signs[i]
                            for j in range(i):
                                quadratic[i * width + j] = 2 * new_signs[i] * new_signs[j] * panels[h + j]
                            quadratic[i * width + i] = panels[h + i]
                        if searched:
                            g = at % BLOCK // width
                            best, error = best_entry(
                                quadratic, linear, lanes, near_runs, g * most, g * most + near_counts[g], scratch
                            )
                        else:
                            best, error = best_entry(quadratic, linear, lanes, runs, 0, count_runs, scratch)
                    if not error < current - MARGIN * abs(current):
                        continue
                    entries[row, v] = best
                    lane = best // LANES * (width * LANES) + best % LANES
                    for i in range(width):
                        j = first + at + i
                        value = new_signs[i] * (lanes[lane + i * LANES] * scale)
                        if signs_stored != SIGNS_IN_ENTRIES:
                            signs[row, j] = new_signs[i]
                        step = values[row, j] - value
                        if step != 0:
                            values[row, j] = value
                            columns[row * 64 + count], steps[row * 64 + count] = at + i, step
                            count += 1
                            for k in range((at + width) // LANES * LANES, 64, LANES):
                                store(
                                    buffer, k, fma_lanes(splat(step), load(panels, tile + (at + i) * 64 + k), load(buffer, k))
                                )
                    changed[row] += 1
                counts[row] = count
                share_steps(coupling, columns, steps, count, row, panels, tile, mixed)
            before = first // 64 if feedback else 0
            add_products(columns, steps, counts, panels, size, first, before, size // 64, rows, size, gradient)

    @kernel
    def tabulate(panels, size, lanes, squares):
        """squares (float32, flat) = p H_SS p^T of all entries, for each vector S of the columns."""
        count_runs = lanes.size // (width * LANES)
        quadratic = np.zeros(width * width, np.float32)
        for v in range(squares.size // (count_runs * LANES)):
            first, at = v * width // 64 * 64, v * width % 64
            for i in range(width):
                h = (first // 64 * size + first + at + i) * 64 + at
                for j in range(i):
                    quadratic[i * width + j] = 2 * panels[h + j]
                quadratic[i * width + i] = panels[h + i]
            squares_of_entries(quadratic, lanes, count_runs, squares, v * count_runs * LANES)

    return sweep, tabulate


(_sweep_2, _tabulate_2), (_sweep_4, _tabulate_4), (_sweep_8, _tabulate_8) = map(_make_sweep, (2, 4, 8))


# Work items are rows, of which a GPU takes 64 columns at a time.
_ITEMS = WorkItems(
    ("factor", "active"), ("changed", "gradient", "values", "entries", "signs"),
    whole=("lanes", "panels", "inverses", "squares"), names=parameters_of(_sweep_8),
)  # fmt: skip


# Kernels with variables of an enclosing function are not cached on disk; these, which call them, are.
@kernel(items=_ITEMS)
def _sweep_2_kernel(*arguments):
    _sweep_2(*arguments)


@kernel(items=_ITEMS)
def _sweep_4_kernel(*arguments):
    _sweep_4(*arguments)


@kernel(items=_ITEMS)
def _sweep_8_kernel(*arguments):
    _sweep_8(*arguments)


@kernel
def _tabulate_2_kernel(*arguments):
    _tabulate_2(*arguments)


@kernel
def _tabulate_4_kernel(*arguments):
    _tabulate_4(*arguments)


@kernel
def _tabulate_8_kernel(*arguments):
    _tabulate_8(*arguments)


_TABULATE = {2: _tabulate_2_kernel, 4: _tabulate_4_kernel, 8: _tabulate_8_kernel}


def squares_of(panels: np.ndarray, columns: int, size: int, table: VectorTable, is_searched: bool) -> np.ndarray:
    """The argument `squares` of a sweep; is_searched: whether the table has a tree."""
    if is_searched or table.signs != SIGNS_IN_ENTRIES:
        return np.empty(0, np.float32)
    squares = np.empty(columns // table.size * table.lanes.size // table.size, np.float32)
    _TABULATE[table.size](panels, size, table.lanes, squares)
    return squares


SWEEPS = {2: _sweep_2_kernel, 4: _sweep_4_kernel, 8: _sweep_8_kernel}
