"""Matrix products of 8-bit codes: weights in panels of 16 rows, activations in rows. See byte_tiles.py for what is multiplied
at a time."""

from __future__ import annotations

from numba.core import types

from ......simd.compile import intrinsic, kernel
from ......simd.llvm import I8, I16X32, I32, I32X16, I64, LANES, constant, load, loop, prefetch, splat, store, vector
from ......simd.memory import address
from ..activations import RUN
from .byte_tiles import BLOCK, COLUMN_TILE, FEW_TOKENS, PANEL, TILE_PANELS, TILE_TOKENS, multiply_tile


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
def write_sums(sums, out, first, count, column, end, written):
    """Copies sums float32 [tiles, tokens, rows of a tile] of `count` tokens to the rows of out from `first` on, columns
    `column` to `end` - 1; not those of the first `written` tokens and tiles that lie wholly within."""
    width, rows = out.shape[1], sums.shape[2]
    source, target = address(sums), address(out)
    for t in range(count):
        for tile in range(sums.shape[0]):
            at = column + rows * tile
            if at + rows > end:
                for i in range(end - at):
                    out[first + t, at + i] = sums[tile, t, i]
            elif t >= written:
                place = target + 4 * ((first + t) * width + at)
                copy_cache_lines(source + 4 * rows * (tile * sums.shape[1] + t), place, rows // LANES)


@kernel
def word_bytes(tokens):
    """Working memory of multiply_bytes for 16-bit numbers: COLUMN_TILE columns of a tile of panels and of so many tokens."""
    return 2 * COLUMN_TILE * (PANEL * TILE_PANELS + tokens)


@intrinsic
def _ask_for(typingctx, address, lines):
    """Asks for so many cache lines, from an address on, into the second-level cache."""

    def generate(context, builder, signature, args):
        loop(builder, args[1], lambda i: prefetch(builder, builder.add(args[0], builder.mul(i, I64(4 * LANES))), 0, 3))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@kernel
def multiply_bytes(
    runs,
    token_runs,
    pairs,
    codes,
    zero,
    scales,
    terms,
    tokens,
    rows,
    first,
    token,
    n,
    start,
    width,
    is_last,
    widened,
    sums,
    words,
    out,
    column,
    asked,
):
    """Adds the products of some columns of two panels, a tile of columns, to sums, and writes these to
    out[token + t, column + r] if the tile is the last. A product is that of token first + t and row r, the sum over groups g of
    scale[g, r] * token scale[t, g] * (sum of code * token code + offset[t, g]) + term[g, r] * total[t, g].

    runs, token_runs: tuples as long as a group, and what shares a scale of the activations, have runs of 16 columns: 1, 2 or
    16, and 2 or 16. pairs: what pair_sums says of the codes; where that is an empty tuple, `zero` is subtracted from them, and
    there are no offsets. codes, scales, terms (or None): addresses of uint8 [2, COLUMN_TILE / CODE_COLUMNS, 16, CODE_COLUMNS],
    less CODE_BIAS, and of float32 [2, groups of COLUMN_TILE, 16]. tokens: addresses of codes int8 [tiles of columns, rows,
    COLUMN_TILE], token scales float32 [tiles, rows, COLUMN_TILE / columns that share one], offsets int32 [tiles, rows, groups]
    and totals float32 [tiles, rows, groups].
    start, width: the tile's first column and columns. n: how many tokens are wanted; those up to a multiple of TILE_TOKENS are
    multiplied too. Working memory: sums, float32 [that multiple or more, 32], and words (of an empty tuple), the address of
    word_bytes(the same); widened: whether they have the tokens of this tile already. out: float32 [any, any]: rows of the
    panels beyond its last column are left out. asked: what is asked for meanwhile: an address, bytes from one piece to the
    next, bytes of a piece, pieces. All C-contiguous.
    """
    group = RUN * len(runs)
    span = RUN * len(token_runs)
    groups = max(1, span // group)
    as_words = pairs is not None and len(pairs) == 0
    blocks, count = width // max(span, group), 2 // TILE_PANELS
    code_step, scale_step = COLUMN_TILE * PANEL, COLUMN_TILE // group * 4 * PANEL
    at_sums, at_out = address(sums), address(out)
    size, whole = PANEL * TILE_PANELS, n // TILE_TOKENS * TILE_TOKENS
    tile_step = sums.shape[0] * 4 * size
    row = start // COLUMN_TILE * rows + first
    token_codes, code_bytes = tokens[0] + row * COLUMN_TILE, COLUMN_TILE
    if as_words:
        token_words, code_bytes = words + 2 * COLUMN_TILE * PANEL * TILE_PANELS, 2 * COLUMN_TILE
        for t in range(0 if widened else -(-n // TILE_TOKENS) * TILE_TOKENS):
            widen_tokens(token_codes + t * COLUMN_TILE, width // BLOCK, token_words + t * code_bytes)
        token_codes = token_words
    turns, turn, pieces = count * -(-n // TILE_TOKENS), 0, 0
    for tile in range(count):
        tile_codes = codes + tile * TILE_PANELS * code_step
        if as_words:
            for p in range(TILE_PANELS):
                widen_codes(tile_codes + p * code_step, width // 4, zero, words + 2 * p * code_step)
            tile_codes = words
        scale_offset = tile * TILE_PANELS * scale_step
        weights = tile_codes, scales + scale_offset, terms + scale_offset if terms is not None else None
        # The last sums of whole tiles are results, and go to their places at once.
        is_result = is_last and column + (tile + 1) * size <= out.shape[1]
        for t in range(0, n, TILE_TOKENS):
            turn += 1
            while pieces * turns < asked[3] * turn:
                _ask_for(asked[0] + pieces * asked[1], asked[2] // (4 * LANES) + 1)
                pieces += 1
            before, step = at_sums + tile * tile_step + 4 * size * t, 4 * size
            to = before
            if is_result and t < whole:
                to, step = at_out + 4 * ((token + t) * out.shape[1] + column + tile * size), 4 * out.shape[1]
            at = 4 * COLUMN_TILE // span * (row + t)
            rest = (
                token_codes + t * code_bytes,
                tokens[1] + at,
                tokens[2] + groups * at,
                tokens[3] + groups * at,
                before,
                to,
                step,
                blocks,
                start == 0,
            )
            if n - t > FEW_TOKENS:
                multiply_tile(None, runs, token_runs, pairs, *weights, *rest)
            else:
                multiply_tile(True, runs, token_runs, pairs, *weights, *rest)
    if is_last:
        write_sums(sums.reshape((count, sums.shape[0], size)), out, token, n, column, out.shape[1], whole)
