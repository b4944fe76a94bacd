"""Values that all heads share, weighted beside each head's own: with latent attention the latents.

Attention passes the softmax weights of a block of keys; they are multiplied with the shared values here, and added to sums
that lie behind the head's own. On the tile unit (AMX) weights and values are rounded to bf16 for that, as activations are
there; elsewhere and with `exact` all is float32.
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from ......simd.compile import intrinsic, kernel
from ......simd.instructions import amx
from ......simd.lanes import LANES, splat
from ......simd.lanes import load as load_lanes
from ......simd.llvm import F32X16, I64, load, loop, store
from ......simd.memory import aligned_empty, keep_alive, view
from ......simd.team import TaskKernel
from ..gemm.float_panels import nearest_bf16_pair
from .tiles import KEY_ROWS, PANEL, multiply_panels, store_bfloat16

KEYS = 128  # of a block
UNIT = 64  # widths of rows are filled up to multiples: of PANEL, and of two tiles
ROWS = 16  # rows of weights and sums are filled up to multiples
_STEP = 32  # keys of a tile
_TILE_BYTES = 1024
# The table of a part, int64: addresses of the weights float32 [rows, KEYS] and of row 0 of the sums, bytes from row to row of
# these, the number of rows, how many of the first to skip, the first key and the number of keys, values and padded width of
# `SharedValues`, the position of the first row's token, and the rows per token.
FIELDS = ("weights", "sums", "step", "rows", "skipped", "key", "count", "values", "width", "position", "members")
_WEIGHTS, _SUMS, _SUMS_STEP, _ROWS, _SKIPPED, _KEY, _COUNT, _VALUES, _WIDTH, _POSITION, _MEMBERS = range(len(FIELDS))


class SharedValues:
    """Values for the shared part of a job.

    rows    float32 [keys, width]
    exact   whether they are multiplied as float32
    part    the address of the part that multiplies them
    padded  their width, filled up to a multiple of UNIT
    values  the rows in the layout that the part reads
    """

    def __init__(self, rows: np.ndarray, exact: bool):
        self.rows, self.width = rows, rows.shape[1]
        self.padded = -(-self.width // UNIT) * UNIT
        if exact or not amx.permitted():
            self.part, self.values = add_weighted_float32.address, self._panels()
            return
        self.part = add_weighted_bf16.address
        self.values = aligned_empty((-(-len(rows) // _STEP), self.padded // 16, _STEP // 2, 16, 2), np.uint16)
        _round_pairs(np.ascontiguousarray(rows, np.float32), self.values)

    def _panels(self) -> np.ndarray:
        """float32 [keys / KEYS, padded / PANEL, KEYS, PANEL], filled up with zeros."""
        m = len(self.rows)
        filled = np.zeros((-(-m // KEYS) * KEYS, self.padded), np.float32)
        filled[:m, : self.width] = self.rows
        return np.ascontiguousarray(filled.reshape(-1, KEYS, self.padded // PANEL, PANEL).transpose(0, 2, 1, 3))


@intrinsic
def _round_pair(typingctx, low, high, out):
    """Sixteen float32 at each of two addresses, as pairs of bf16 at a third."""

    def generate(context, builder, signature, args):
        low, high = (load(builder, at, F32X16) for at in args[:2])
        store(builder, nearest_bf16_pair(builder, low, high), args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@kernel
def _round_pairs(rows, out):
    """rows: float32 [keys, width] -> uint16 [keys / 32, width / 16, 16, 16, 2], filled up with zeros: pairs of keys, and of
    each pair sixteen columns after the other."""
    keys, width = rows.shape
    steps, panels = out.shape[0], out.shape[1]
    end = np.zeros((3, 16), np.float32)  # of two rows the columns behind the last full sixteen; and zeros
    zeros, full = end.ctypes.data + 128, width // 16
    for pair in range(steps * _STEP // 2):
        step, within = pair // (_STEP // 2), pair % (_STEP // 2)
        low, high = 2 * pair < keys, 2 * pair + 1 < keys
        for k in range(2):
            for j in range(width % 16):
                end[k, j] = rows[2 * pair + k, 16 * full + j] if 2 * pair + k < keys else 0
        first, to = rows.ctypes.data + 8 * pair * width, out.ctypes.data + step * panels * _TILE_BYTES + within * 64
        for panel in range(panels):
            above, below = zeros, zeros
            if panel < full:
                above = first + 64 * panel if low else zeros
                below = first + 64 * panel + 4 * width if high else zeros
            elif panel == full:
                above, below = end.ctypes.data, end.ctypes.data + 64
            _round_pair(above, below, to + _TILE_BYTES * panel)


def _tile_product(blocks: int):
    """The operation (weights, block_step, values, value_step, sums, sum_step, steps): adds `blocks` times 16 rows of weights
    times two panels of sixteen columns to the sums, over 32 * steps keys. Addresses, and bytes from block to block of rows,
    from 32 keys of the values to the next, and from row to row of the sums."""

    @intrinsic
    def product(typingctx, weights, block_step, values, value_step, sums, sum_step, steps):
        def generate(context, builder, signature, args):
            b = builder
            weights, block_step, values, value_step, sums, sum_step, steps = args
            tiles = [(r, p) for r in range(blocks) for p in range(2)]
            at = {(r, p): b.add(sums, b.add(b.mul(sum_step, I64(16 * r)), I64(64 * p))) for r, p in tiles}
            for r, p in tiles:
                amx.load_tile(b, 2 * r + p, at[r, p], sum_step)

            def step(i):
                for p in range(2):
                    value = b.add(values, b.add(b.mul(i, value_step), I64(_TILE_BYTES * p)))
                    amx.load_tile(b, 6 + p, value, I64(amx.ROW_BYTES))
                for r in range(blocks):
                    weight = b.add(weights, b.add(b.mul(i, I64(_TILE_BYTES)), b.mul(block_step, I64(r))))
                    amx.load_tile(b, 4 + r, weight, I64(amx.ROW_BYTES))
                    for p in range(2):
                        amx.add_products(b, 2 * r + p, 4 + r, 6 + p)

            loop(b, steps, step)
            for r, p in tiles:
                amx.store_tile(b, 2 * r + p, at[r, p], sum_step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return product


_two_blocks, _one_block = _tile_product(2), _tile_product(1)


@kernel
def _steps(job, block):
    """The number of times 32 keys, of the block of keys, that the queries of the rows 16 * block ... see."""
    last = job[_POSITION] + min(16 * block + 15, job[_ROWS] - 1) // job[_MEMBERS]
    return (min(job[_COUNT], last + 1 - job[_KEY]) + _STEP - 1) // _STEP


@TaskKernel
def add_weighted_bf16(argument, number):
    """Adds weights times values to the sums of a block's rows, filled up to a multiple of ROWS: as bf16 on the tile unit."""
    job = view(argument, len(FIELDS), np.int64)
    rows, skipped, count, width = job[_ROWS], job[_SKIPPED], job[_COUNT], job[_WIDTH]
    first, blocks, steps = skipped // ROWS, (rows + ROWS - 1) // ROWS, (count + _STEP - 1) // _STEP
    weights = view(job[_WEIGHTS], rows * KEYS, np.float32)
    filled = (count + LANES - 1) // LANES * LANES
    buffer = np.empty((blocks - first) * ROWS * KEYS + 32, np.uint16)
    rounded = buffer[(-buffer.ctypes.data & 63) // 2 :]
    for r in range(first * ROWS, blocks * ROWS):
        used = skipped <= r < rows
        to = ((r // ROWS - first) * (KEYS // _STEP) * ROWS + r % ROWS) * _STEP
        for j in range(0, steps * _STEP, LANES):
            value = load_lanes(weights, r * KEYS + j) if used and j < filled else splat(0)
            store_bfloat16(rounded, to + j // _STEP * ROWS * _STEP + j % _STEP, value)
    block_step, value_step = ROWS * KEYS * 2, width // 16 * _TILE_BYTES
    at_rounded, values = rounded.ctypes.data, job[_VALUES] + job[_KEY] // _STEP * value_step
    amx.configure()
    for panel in range(0, width // 16, 2):
        value, sums = values + panel * _TILE_BYTES, job[_SUMS] + 64 * panel
        for r in range(first, blocks - 1, 2):
            to = sums + r * ROWS * job[_SUMS_STEP]
            _two_blocks(
                at_rounded + (r - first) * block_step, block_step, value, value_step, to, job[_SUMS_STEP], _steps(job, r + 1)
            )
        if (blocks - first) % 2:
            r = blocks - 1
            to = sums + r * ROWS * job[_SUMS_STEP]
            _one_block(at_rounded + (r - first) * block_step, block_step, value, value_step, to, job[_SUMS_STEP], steps)
    amx.release()
    keep_alive(rounded)


@kernel
def sum_squares(address, step, rows, factors, sums):
    """sums += sums over the rows of (factor of the row * x)^2: float32 x, its rows `step` bytes apart; sums float64 [width]."""
    width, rows_by_four = sums.size, rows // 4 * 4
    for r in range(0, rows_by_four, 4):
        at = address + r * step
        a, b = view(at, width, np.float32), view(at + step, width, np.float32)
        c, d = view(at + 2 * step, width, np.float32), view(at + 3 * step, width, np.float32)
        e, f, g, h = factors[r], factors[r + 1], factors[r + 2], factors[r + 3]
        for j in range(width):
            v, w, y, z = a[j] * e, b[j] * f, c[j] * g, d[j] * h
            sums[j] += np.float64((v * v + w * w) + (y * y + z * z))
    for r in range(rows_by_four, rows):
        a = view(address + r * step, width, np.float32)
        for j in range(width):
            v = a[j] * factors[r]
            sums[j] += np.float64(v * v)


@TaskKernel
def add_weighted_float32(argument, number):
    """As add_weighted_bf16, in float32."""
    job = view(argument, len(FIELDS), np.int64)
    skipped, width = job[_SKIPPED], job[_WIDTH]
    weights, sums = job[_WEIGHTS] + 4 * KEYS * skipped, job[_SUMS] + job[_SUMS_STEP] * skipped
    values = job[_VALUES] + 4 * width * job[_KEY]
    rows, step, members = job[_ROWS] - skipped, job[_SUMS_STEP], job[_MEMBERS]
    keys = job[_POSITION] + skipped // members + 1 - job[_KEY], members, KEY_ROWS
    for panel in range(width // PANEL):
        value = values + 4 * KEYS * PANEL * panel
        to = sums + 4 * PANEL * panel
        multiply_panels(weights, 4 * KEYS, rows, value, 1, job[_COUNT], to, step, False, value, value, keys)
