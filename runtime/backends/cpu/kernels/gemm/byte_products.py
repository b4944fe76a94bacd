"""Matrix products of 8-bit codes: weights in panels of 16 rows, activations in rows. See byte_tiles.py for what is multiplied
at a time."""

from __future__ import annotations

from numba.core import types

from ......simd.compile import intrinsic, kernel
from ......simd.llvm import I8, I16X32, I32, I32X16, I64, LANES, constant, load, loop, splat, store, vector
from ......simd.memory import address
from .byte_tiles import BLOCK, FEW_TOKENS, PANEL, TILE_PANELS, TILE_TOKENS, multiply_tile

COLUMN_TILE = 512  # columns multiplied at a time for all tokens: the codes of two panels then stay in the first-level cache


@intrinsic
def copy_cache_lines(typingctx, source, target, lines):
    """Copies `lines` times 64 bytes from one address to another."""

    def generate(context, builder, signature, args):
        source, target, lines = args

        def line(i):
            place = builder.mul(i, I64(4 * LANES))
            store(builder, load(builder, source, I32X16, place), target, place)

        loop(builder, lines, line)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@intrinsic
def widen_codes(typingctx, source, lines, zero, target):
    """Writes `lines` lines of a panel of codes, four columns of 16 rows each, as twice as many lines of 16-bit numbers, two
    columns each, less `zero`."""

    def generate(context, builder, signature, args):
        source, lines, zero, target = args
        b = builder
        both = b.mul(b.trunc(zero, I32), I32(0x10001))
        zeros = b.bitcast(splat(b, both), I16X32)

        def line(i):
            codes = load(b, source, I32X16, b.mul(i, I64(4 * LANES)))
            for half in range(2):
                low = b.and_(b.lshr(codes, constant(I32X16, 16 * half)), constant(I32X16, 0xFF))
                moved = b.shl(codes, constant(I32X16, 8)) if half == 0 else b.lshr(codes, constant(I32X16, 8))
                words = b.bitcast(b.or_(low, b.and_(moved, constant(I32X16, 0xFF0000))), I16X32)
                store(b, b.sub(words, zeros), target, b.mul(b.add(b.mul(i, I64(2)), I64(half)), I64(4 * LANES)))

        loop(b, lines, line)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i), generate


@intrinsic
def widen_tokens(typingctx, source, blocks, target):
    """Writes blocks of 32 signed bytes as 16-bit numbers."""

    def generate(context, builder, signature, args):
        source, blocks, target = args

        def block(i):
            codes = load(builder, source, vector(I8, 32), builder.mul(i, I64(32)))
            store(builder, builder.sext(codes, I16X32), target, builder.mul(i, I64(64)))

        loop(builder, blocks, block)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@kernel
def write_sums(sums, out, first, count, column, end):
    """Copies sums float32 [tiles, tokens, rows of a tile] of `count` tokens to the rows of out from `first` on, columns
    `column` to `end` - 1."""
    width, rows = out.shape[1], sums.shape[2]
    source, target = address(sums), address(out)
    for t in range(count):
        for tile in range(sums.shape[0]):
            at = column + rows * tile
            if at + rows <= end:
                place = target + 4 * ((first + t) * width + at)
                copy_cache_lines(source + 4 * rows * (tile * sums.shape[1] + t), place, rows // LANES)
            else:
                for i in range(end - at):
                    out[first + t, at + i] = sums[tile, t, i]


@kernel
def word_bytes(tokens):
    """Working memory of multiply_bytes for 16-bit numbers: COLUMN_TILE columns of a tile of panels and of so many tokens."""
    return 2 * COLUMN_TILE * (PANEL * TILE_PANELS + tokens)


@kernel
def multiply_bytes(
    half_groups, pairs, codes, zero, scales, terms, tokens, token_scales, offsets, totals, sums, words, out, column
):
    """out[t, column + r] = sum over groups g of
    scale[g, r] * token scale[t, g] * (sum of code * token code + offset[t, g]) + term[g, r] * total[t, g].

    half_groups: True if groups have 16 columns, None if 32. pairs: what pair_sums says of the codes; where that is an empty
    tuple, `zero` is subtracted from them, and there are no offsets. codes: uint8 [panels, columns / CODE_COLUMNS, 16,
    CODE_COLUMNS], less CODE_BIAS, panels a multiple of 2; scales and terms (or None): float32 [panels, groups, 16]. tokens:
    int8 [n, columns], n a multiple of TILE_TOKENS, token_scales: float32 [n, columns / 32], offsets: int32 [n, groups], totals:
    float32 [n, groups]. Working memory: sums, float32 [pairs, tokens, 32], and words (of an
    empty tuple), the address of word_bytes(tokens). out: float32 [n or less, any]: rows of the panels beyond its last column
    are left out. All C-contiguous.
    """
    n, columns = tokens.shape
    groups = 2 if half_groups is not None else 1
    as_words = pairs is not None and len(pairs) == 0
    blocks = columns // BLOCK
    code_step, scale_step = columns * PANEL, blocks * groups * 4 * PANEL
    at_codes, at_scales, at_sums = address(codes), address(scales), address(sums)
    at_terms = address(terms) if terms is not None else None
    at_tokens, at_token_scales = address(tokens), address(token_scales)
    at_offsets, at_totals = address(offsets), address(totals)
    token_words = words + 2 * COLUMN_TILE * PANEL * TILE_PANELS
    token_steps = (2 * COLUMN_TILE if as_words else columns, 4 * blocks, 4 * groups * blocks)
    panel_step = 2 * COLUMN_TILE * PANEL if as_words else code_step
    tiles = sums.shape[0] * 2 // TILE_PANELS
    token_tile = sums.shape[1] // TILE_TOKENS * TILE_TOKENS
    tile_step = token_tile * 4 * PANEL * TILE_PANELS
    for token in range(0, n, token_tile):
        count = min(token_tile, n - token)
        wanted = min(count, out.shape[0] - token)
        for panel in range(0, codes.shape[0], tiles * TILE_PANELS):
            n_tiles = min(tiles, (codes.shape[0] - panel) // TILE_PANELS)
            for start in range(0, blocks, COLUMN_TILE // BLOCK):
                width = min(COLUMN_TILE // BLOCK, blocks - start)
                token_codes = at_tokens + token * columns + start * BLOCK
                if as_words:
                    for t in range(count):
                        widen_tokens(token_codes + t * columns, width, token_words + t * 2 * COLUMN_TILE)
                    token_codes = token_words
                for tile in range(n_tiles):
                    first = panel + tile * TILE_PANELS
                    scale_offset = first * scale_step + start * groups * 4 * PANEL
                    tile_codes = at_codes + first * code_step + start * BLOCK * PANEL
                    if as_words:
                        for p in range(TILE_PANELS):
                            widen_codes(tile_codes + p * code_step, width * BLOCK // 4, zero, words + p * panel_step)
                        tile_codes = words
                    weights = (
                        tile_codes,
                        at_scales + scale_offset,
                        at_terms + scale_offset if at_terms is not None else None,
                        (panel_step, scale_step),
                    )
                    t = 0
                    while t < wanted:
                        group_offset = (token + t) * token_steps[2] + start * groups * 4
                        rest = (
                            token_codes + t * token_steps[0],
                            at_token_scales + (token + t) * token_steps[1] + start * 4,
                            at_offsets + group_offset,
                            at_totals + group_offset,
                            token_steps,
                            at_sums + tile * tile_step + t * 4 * PANEL * TILE_PANELS,
                            width,
                            start == 0,
                        )
                        if wanted - t > FEW_TOKENS:
                            multiply_tile(None, half_groups, pairs, *weights, *rest)
                        else:
                            multiply_tile(True, half_groups, pairs, *weights, *rest)
                        t += TILE_TOKENS
            size = PANEL * TILE_PANELS
            tiles_sums = sums.reshape(-1)[: n_tiles * token_tile * size].reshape((n_tiles, token_tile, size))
            write_sums(tiles_sums, out, token, wanted, column + panel * PANEL, out.shape[1])
