"""Scales under a covariance: a search of every group's scale, minimum and table, and least squares for d and dmin.

The candidates of a group are tried one after the other: its codes are found again by descent within the group, with the exact
change of the error r H r^T that comes of it. The best one is taken; the present parameters are the first candidate, so that
the error never grows.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ...data_classes import dataclass
from ...simd.compile import kernel
from ...simd.lanes import fma_lanes, load, splat, store
from ...simd.memory import scratch
from .descent.scalar_descent import nearest_entry
from .matrix.panels import add_products
from .values import ScalarRows
from .vectors import VectorRows

PASSES = 2  # over a group's codes for each candidate
MAX_GROUP = 64
# Scales that are stored as they are: factors of d. Exponents (e8m0) can only be doubled and halved.
_FACTORS = {2: (0.97, 1.03), 3: (0.93, 0.96, 0.98, 1.02, 1.04, 1.07)}
_EXPONENT_FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class Candidates:
    """Parameters of groups that are tried, [rows, groups, candidates]; the first are those that the rows have.

    factor, offset  float32; flag: uint8
    d, scales, flags, minima  what makes them, None for what does not change
    """

    factor: np.ndarray
    offset: np.ndarray
    flag: np.ndarray
    d: np.ndarray | None
    scales: np.ndarray | None
    flags: np.ndarray | None
    minima: np.ndarray | None


def candidates(rows: ScalarRows, effort: int) -> Candidates:
    """What is tried for every group: neighbouring scale and minimum codes, both tables, or d times some factors."""
    layout = rows.fields.layout
    d = rows.per_group(rows.d)[:, :, None]
    scales = flags = minima = None
    if rows.scales is None:
        factors = _EXPONENT_FACTORS if layout.d_format == "e8m0" else _FACTORS[effort]
        d = d * np.array((1.0, *factors), np.float32)
        if layout.d_format != "e8m0":
            with np.errstate(over="ignore"):
                d = d.astype(np.float16).astype(np.float32)
            d = np.where(np.isfinite(d), d, d[:, :, :1])
        count = d.shape[2]
    else:
        steps = (0, -1, 1) if effort < 3 else (0, -1, 1, -2, 2)
        tried = list(
            product(steps, (0, 1) if rows.flags is not None else (0,), (0, -1, 1) if rows.minima is not None else (0,))
        )
        scale_steps, flag_steps, minimum_steps = np.array(tried, np.int64).T
        count = len(tried)
        levels = 1 << layout.scales.shape[-1]  # type: ignore[union-attr]
        scales = np.clip(rows.scales[:, :, None] + scale_steps, 0, levels - 1).astype(np.uint8)
        if rows.flags is not None:
            flags = rows.flags[:, :, None] ^ flag_steps.astype(np.uint8)
        if rows.minima is not None:
            codes = 1 << layout.minima.shape[-1]  # type: ignore[union-attr]
            minima = np.clip(rows.minima[:, :, None] + minimum_steps, 0, codes - 1).astype(np.uint8)
    shape = (len(rows.codes), rows.groups, count)
    offset = np.zeros((1, 1, 1), np.float32)
    if rows.dmin is not None:
        offset = rows.offsets(rows.per_group(rows.dmin)[:, :, None], minima)
    flag = np.zeros((1, 1, 1), np.uint8) if flags is None else flags
    full = [np.ascontiguousarray(np.broadcast_to(a, shape)) for a in (rows.factors(d, scales), offset, flag)]
    factor, offset, flag = full
    return Candidates(factor, offset, flag, d if rows.scales is None else None, scales, flags, minima)


def search_scales(rows: ScalarRows, effort: int, arrays, damped, gradient: np.ndarray, values: np.ndarray) -> None:
    """Takes the best candidate of every group; updates the rows' fields, values (float32 [rows, n]) and gradient."""
    tried = candidates(rows, effort)
    chosen = np.zeros((len(rows.codes), rows.groups), np.int64)
    _search(
        tried.factor, tried.offset, tried.flag, rows.table.group, arrays, damped.panels, damped.diagonal, damped.size,
        gradient, values, rows.codes, chosen,
    )  # fmt: skip
    for name in ("d", "scales", "flags", "minima"):
        options = getattr(tried, name)
        if options is not None:
            taken = np.ascontiguousarray(np.take_along_axis(options, chosen[:, :, None], axis=2)[:, :, 0])
            setattr(rows, name, taken if name != "d" else np.ascontiguousarray(taken[:, :: rows.groups // rows.d.shape[1]]))


@kernel
def _search(factor, offset, flag, group, table, panels, diagonal, size, gradient, values, codes, chosen):
    """Fills chosen, int64 [rows, groups], and updates values, codes and gradient."""
    entries, midpoints, entry_codes, nearest, lowest = table
    rows, n = values.shape
    columns, steps, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    buffer, local = np.empty(64, np.float32), np.empty(64, np.float32)
    trial, best = np.empty(64, np.int64), np.empty(64, np.int64)
    trial_values, best_values = np.empty(64, np.float32), np.empty(64, np.float32)
    for first in range(0, n, 64):
        tile = (first // 64 * size + first) * 64
        for row in range(rows):
            buffer[:] = gradient[row * size + first : row * size + first + 64]
            count = 0
            for start in range(0, min(64, n - first), group):
                g = (first + start) // group
                least, choice = 0.0, -1
                for k in range(factor.shape[2]):
                    a, b, t = factor[row, g, k], offset[row, g, k], flag[row, g, k]
                    if a == 0 or not abs(a) < 1e30:
                        continue
                    local[:] = buffer
                    change = 0.0
                    for sweep in range(PASSES):
                        for i in range(start, start + group):
                            j = first + i
                            h = diagonal[j]
                            old = values[row, j] if sweep == 0 else trial_values[i]
                            target = old + local[i] / h if h > 0 else old
                            entry = nearest_entry((target - b) / a, t, midpoints, nearest, lowest)
                            new = a * entries[t, entry] + b
                            trial[i], trial_values[i] = entry, new
                            step = old - new
                            if step != 0:
                                change += np.float64(step) * (2 * np.float64(local[i]) + np.float64(step) * np.float64(h))
                                lanes = splat(step)
                                for at in range(start // 16 * 16, start + group, 16):
                                    store(local, at, fma_lanes(lanes, load(panels, tile + i * 64 + at), load(local, at)))
                    if change < least:
                        least, choice = change, k
                        best[start : start + group] = trial[start : start + group]
                        best_values[start : start + group] = trial_values[start : start + group]
                if choice < 0:
                    continue
                chosen[row, g] = choice
                for i in range(start, start + group):
                    j = first + i
                    step = values[row, j] - best_values[i]
                    values[row, j] = best_values[i]
                    codes[row, j] = entry_codes[best[i]]
                    if step != 0:
                        columns[row * 64 + count] = i
                        steps[row * 64 + count] = step
                        count += 1
                        lanes = splat(step)
                        for at in range(0, 64, 16):
                            store(buffer, at, fma_lanes(lanes, load(panels, tile + i * 64 + at), load(buffer, at)))
            counts[row] = count
        add_products(columns, steps, counts, panels, size, first, 0, size // 64, rows, size, gradient)


@kernel
def _add_columns(step, first, panels, size, panel_from, panel_to, out):
    """out (float32 [rows * size], flat) += step (float32 [rows, width], of the columns from `first` on) times H, in panels
    panel_from ... panel_to - 1."""
    rows, width = step.shape
    columns, factors, counts = np.empty(rows * 64, np.int32), np.empty(rows * 64, np.float32), np.empty(rows, np.int32)
    for start in range(first // 64 * 64, first + width, 64):
        for row in range(rows):
            count = 0
            for i in range(max(start, first), min(start + 64, first + width)):
                if step[row, i - first] != 0:
                    columns[row * 64 + count] = i - start
                    factors[row * 64 + count] = step[row, i - first]
                    count += 1
            counts[row] = count
        add_products(columns, factors, counts, panels, size, start, panel_from, panel_to, rows, size, out)


def refit(rows: ScalarRows | VectorRows, damped, gradient: np.ndarray, values: np.ndarray) -> None:
    """d, and dmin if there is one, by least squares under H with the codes as they are, block after block.

    Where the rounded optimum lowers the error it is taken; rows' fields, values and gradient are updated.
    """
    if rows.fields.layout.d_format == "e8m0":
        return
    n = values.shape[1]
    stored = np.float16 if rows.fields.layout.row_scale in (None, "f16") else np.float32
    width = n // rows.d.shape[1]
    gradients = gradient.reshape(len(values), -1)
    for block in range(n // width):
        first = block * width
        part = slice(first, first + width)
        groups = slice(first // rows.table.group, (first + width) // rows.table.group)
        offset = np.repeat(rows.parameters()[1][:, groups], rows.table.group, axis=1)
        shape = [values[:, part] - offset, offset] if rows.dmin is not None else [values[:, part]]
        parts = [np.ascontiguousarray(p) for p in shape]
        panels = first // 64, -(-(first + width) // 64)
        products = []
        for p in parts:
            product = scratch("covariance_product", gradients.shape, np.float32)
            product[:, 64 * panels[0] : 64 * panels[1]] = 0
            _add_columns(p, first, damped.panels, damped.size, *panels, product.reshape(-1))
            products.append(product[:, part].copy())
        slope = np.stack([(p.astype(np.float64) * gradients[:, part]).sum(axis=1) for p in parts], axis=1)
        square = np.stack([[(p.astype(np.float64) * out).sum(axis=1) for out in products] for p in parts]).transpose(2, 0, 1)
        t = _solve(square, slope)
        old = [rows.d[:, block], rows.dmin[:, block]] if rows.dmin is not None else [rows.d[:, block]]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            new = [(o * (1 + t[:, i])).astype(stored).astype(np.float32) for i, o in enumerate(old)]
            t = np.stack([np.where(o != 0, nw.astype(np.float64) / o - 1, 0) for o, nw in zip(old, new, strict=True)], axis=1)
        change = -2 * (t * slope).sum(axis=1) + np.einsum("ri,rij,rj->r", t, square, t)
        accepted = (change < 0) & np.isfinite(t).all(axis=1) & (np.abs(t) < 0.5).all(axis=1)
        if not accepted.any():
            continue
        rows.d[accepted, block] = new[0][accepted]
        if rows.dmin is not None:
            rows.dmin[accepted, block] = new[1][accepted]
        fresh = rows.values(groups)
        step = np.ascontiguousarray(values[:, part] - fresh)
        values[:, part] = fresh
        _add_columns(step, first, damped.panels, damped.size, 0, damped.size // 64, gradient)


def _solve(square: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The solutions t of square t = slope, [rows, 1 or 2], 0 where there is none; of two unknowns with a little damping."""
    if slope.shape[1] == 1:
        return np.divide(slope, square[:, 0], out=np.zeros_like(slope), where=square[:, 0] > 0)
    a, b, c = square[:, 0, 0] * (1 + 1e-6), square[:, 0, 1], square[:, 1, 1] * (1 + 1e-6)
    determinant = a * c - b * b
    usable = determinant > 1e-9 * a * c
    inverse = np.divide(1, determinant, out=np.zeros_like(a), where=usable)
    both = np.stack([(c * slope[:, 0] - b * slope[:, 1]) * inverse, (a * slope[:, 1] - b * slope[:, 0]) * inverse], axis=1)
    alone = np.divide(slope[:, 0], a, out=np.zeros_like(a), where=a > 0)
    return np.where(usable[:, None], both, np.stack([alone, np.zeros_like(alone)], axis=1))
