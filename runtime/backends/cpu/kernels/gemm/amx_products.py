"""Matrix products of bf16 numbers, summed up in float32, with the tile unit (AMX).

Weights come in bf16 panels (float_panels.py), or in panels of bytes (unpack_panels.py), which are expanded COLUMN_TILE columns
at a time, so that no more than that ever exists as bf16.
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from ......simd.compile import intrinsic, kernel
from ......simd.instructions import amx
from ......simd.llvm import F32X16, I32X16, I64, constant, fma, load, loop, splat, store
from ......simd.memory import address
from .byte_products import copy_cache_lines, write_sums
from .byte_tiles import PANEL
from .float_panels import AMX_TOKENS, STEP, bf16_pair, canonical_nan

COLUMN_TILE = 512  # columns multiplied at a time for all tokens: two panels of them stay in the first-level cache
_PAIR_BYTES = 4 * PANEL  # two columns of a panel
TILE_BYTES = 2 * STEP * AMX_TOKENS  # 32 columns of 16 tokens, or of a panel
SUM_BYTES = 4 * 2 * PANEL * AMX_TOKENS  # of 16 tokens with two panels


@intrinsic
def _multiply_tile(typingctx, is_single, weights, weight_step, tokens, token_step, sums, steps, first):
    """Two panels times 32 tokens (16 if `is_single` is a boolean and not None), over `steps` times 32 columns, added to sums,
    float32 [tokens, 32] (first: written there). Addresses, and bytes from one panel and from 16 tokens to the next: int64."""
    halves = 2 if isinstance(is_single, types.NoneType) else 1

    def generate(context, builder, signature, args):
        b = builder
        _, weights, weight_step, tokens, token_step, sums, steps, first = args
        pairs = [(t, p) for t in range(halves) for p in range(2)]
        weight_at = [weights, b.add(weights, weight_step)]
        token_at = [tokens, b.add(tokens, token_step)]
        row_step = I64(2 * 4 * PANEL)
        sums_at = {(t, p): b.add(sums, I64(4 * PANEL * (2 * AMX_TOKENS * t + p))) for t, p in pairs}
        with b.if_else(first) as (fresh, later):
            with fresh:
                for t, p in pairs:
                    amx.zero(b, 2 * t + p)
            with later:
                for t, p in pairs:
                    amx.load_tile(b, 2 * t + p, sums_at[t, p], row_step)

        def step(i):
            along = b.mul(i, I64(TILE_BYTES))
            for p in range(2):
                amx.load_tile(b, 6 + p, b.add(weight_at[p], along), I64(amx.ROW_BYTES))
            for t in range(halves):
                amx.load_tile(b, 4 + t, b.add(token_at[t], along), I64(amx.ROW_BYTES))
                for p in range(2):
                    amx.add_products(b, 2 * t + p, 4 + t, 6 + p)

        loop(b, steps, step)
        for t, p in pairs:
            amx.store_tile(b, 2 * t + p, sums_at[t, p], row_step)
        return context.get_dummy_value()

    i = types.int64
    return types.void(is_single, i, i, i, i, i, i, types.boolean), generate


@intrinsic
def _expand_codes(typingctx, codes, scales, terms, zero, fours, groups, out):
    """bf16 numbers of some groups of a panel: scale * code + (term - zero * scale). Addresses; terms may be None; zero a float;
    fours: columns of a group by four."""
    has_terms = not isinstance(terms, types.NoneType)

    def generate(context, builder, signature, args):
        b = builder
        codes, scales, terms, zero, fours, groups, out = args
        minus = b.fneg(splat(b, zero))

        def group(g):
            scale = canonical_nan(b, load(b, scales, F32X16, b.mul(g, I64(_PAIR_BYTES))))
            term = b.fmul(scale, minus)
            if has_terms:
                term = b.fadd(term, canonical_nan(b, load(b, terms, F32X16, b.mul(g, I64(_PAIR_BYTES)))))
            first = b.mul(g, fours)

            def four(i):
                place = b.mul(b.add(first, i), I64(4 * PANEL))
                words = load(b, codes, I32X16, place)
                numbers = []
                for k in range(4):
                    byte = b.and_(b.lshr(words, constant(I32X16, 8 * k)), constant(I32X16, 255))
                    numbers.append(fma(b, b.sitofp(byte, F32X16), scale, term))
                to = b.mul(place, I64(2))
                for k in range(2):
                    store(b, bf16_pair(b, *numbers[2 * k : 2 * k + 2]), b.add(out, to), k * _PAIR_BYTES)

            loop(b, fours, four)

        loop(b, groups, group)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i if has_terms else terms, types.float32, i, i, i), generate


@kernel
def _multiply_pair(weights, weight_step, tokens, token_step, blocks, sums, steps, first):
    """Two panels times `blocks` blocks of 16 tokens; addresses and bytes."""
    for t in range(0, blocks - 1, 2):
        _multiply_tile(None, weights, weight_step, tokens + t * token_step, token_step, sums + t * SUM_BYTES, steps, first)
    if blocks % 2:
        t = blocks - 1
        _multiply_tile(True, weights, weight_step, tokens + t * token_step, token_step, sums + t * SUM_BYTES, steps, first)


@kernel
def multiply_tiles(panels, tokens, sums, buffer, out, column, end):
    """out[t, column + r] = sum over c of row r, column c of the panels times token t, column c; on the tile unit.

    panels: bf16 as uint16 [panels, columns / 2, 16, 2], columns a multiple of 32; tokens: from `round_rows`, uint16 [n / 16,
    parts, columns / 32, 16, 32], whose parts are added up; sums: float32 [pairs of panels, tokens, 32] and buffer: uint16 [2 *
    512 * 16], for use meanwhile, at cache lines; out: float32 [n or less, any], of which columns from `end` on are not written.
    All C-contiguous.
    """
    n, columns, rows = tokens.shape[0], tokens.shape[2] * STEP, panels.shape[0]
    part_step = tokens.shape[2] * TILE_BYTES
    panel_bytes, token_step, sum_step = 2 * columns * PANEL, tokens.shape[1] * part_step, sums.shape[1] * 8 * PANEL
    at_panels, at_tokens, at_sums, at_buffer = address(panels), address(tokens), address(sums), address(buffer)
    amx.configure()
    for token in range(0, n, sums.shape[1] // AMX_TOKENS):
        blocks = min(sums.shape[1] // AMX_TOKENS, n - token)
        for panel in range(0, rows, 2 * sums.shape[0]):
            pairs = min(sums.shape[0], (rows - panel + 1) // 2)
            for start in range(0, columns, COLUMN_TILE):
                steps = min(COLUMN_TILE, columns - start) // STEP
                for pair in range(pairs):
                    second = panel + 2 * pair + 1 < rows
                    weights = at_panels + (panel + 2 * pair) * panel_bytes + 2 * start * PANEL
                    second_step = panel_bytes if second else 0
                    if weights % 64:  # a file's alignment: across two lines every load would take twice as long
                        for p in range(2 if second else 1):
                            to = at_buffer + p * COLUMN_TILE * 2 * PANEL
                            copy_cache_lines(weights + p * panel_bytes, to, steps * TILE_BYTES // 64)
                        weights, second_step = at_buffer, COLUMN_TILE * 2 * PANEL if second else 0
                    for part in range(tokens.shape[1]):
                        source = at_tokens + token * token_step + part * part_step + start // STEP * TILE_BYTES
                        first = start == 0 and part == 0
                        _multiply_pair(
                            weights, second_step, source, token_step, blocks, at_sums + pair * sum_step, steps, first
                        )
            count = min(blocks * AMX_TOKENS, out.shape[0] - token * AMX_TOKENS)
            write_sums(sums[:pairs], out, token * AMX_TOKENS, count, column + panel * PANEL, end, 0)
    amx.release()


@kernel
def multiply_expanded(codes, scales, terms, zero, group, tokens, sums, buffer, out, column):
    """As multiply_tiles, for panels of bytes (Panels in unpack_panels.py), an even number of them; tokens of one part; terms:
    of size 0 if there are none."""
    n, columns, rows = tokens.shape[0], tokens.shape[2] * STEP, codes.shape[0]
    token_step, sum_step = tokens.shape[2] * TILE_BYTES, sums.shape[1] * 8 * PANEL
    at_codes, at_scales, at_tokens = address(codes), address(scales), address(tokens)
    at_sums, at_buffer = address(sums), address(buffer)
    at_terms = address(terms)
    zero = np.float32(zero)
    amx.configure()
    for token in range(0, n, sums.shape[1] // AMX_TOKENS):
        blocks = min(sums.shape[1] // AMX_TOKENS, n - token)
        for panel in range(0, rows, 2 * sums.shape[0]):
            pairs = min(sums.shape[0], (rows - panel) // 2)
            for start in range(0, columns, COLUMN_TILE):
                width = min(COLUMN_TILE, columns - start)
                source = at_tokens + token * token_step + start // STEP * TILE_BYTES
                for pair in range(pairs):
                    for p in range(2):
                        first = (panel + 2 * pair + p) * columns + start
                        at_group, to = first // group * _PAIR_BYTES, at_buffer + p * 2 * COLUMN_TILE * PANEL
                        at, scale = at_codes + first * PANEL, at_scales + at_group
                        if terms.size:
                            _expand_codes(at, scale, at_terms + at_group, zero, group // 4, width // group, to)
                        else:
                            _expand_codes(at, scale, None, zero, group // 4, width // group, to)
                    at = at_sums + pair * sum_step
                    _multiply_pair(
                        at_buffer, 2 * COLUMN_TILE * PANEL, source, token_step, blocks, at, width // STEP, start == 0
                    )
            count = min(blocks * AMX_TOKENS, out.shape[0] - token * AMX_TOKENS)
            write_sums(sums[:pairs], out, token * AMX_TOKENS, count, column + panel * PANEL, out.shape[1], 0)
    amx.release()
