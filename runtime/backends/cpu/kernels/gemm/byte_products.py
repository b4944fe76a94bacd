"""Matrix products of 8-bit codes: weights in panels of 16 rows, activations in rows.

A panel holds the codes of 16 rows, the same four columns of all rows together, which is what one instruction of AVX-512 VNNI
multiplies with four columns of a token. Codes are unsigned, and a group of columns (16 or 32) has per row a scale and perhaps
a term that is added: weight = scale * (code - zero) + term. Products of codes are exact integers; each group's is turned to
float32, scaled and added up, column block after column block.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic, kernel
from ......simd.dot_products import ByteDots, PairDots, pairs_that_fit
from ......simd.llvm import F32, F32X16, I32, I32X16, I64, LANES, constant, fma, load, loop, splat, store
from ......simd.memory import address
from ......simd.target import target

PANEL = 16  # rows
BLOCK = 32  # columns that share an activation's scale
COLUMN_TILE = 512  # columns multiplied at a time for all tokens: the codes of two panels then stay in the first-level cache

# Panels and tokens of a register tile: two sums per panel and token, one of integers and one of floats.
TILE_PANELS, TILE_TOKENS = (2, 6) if target().lane_registers == 32 else (1, 3)


def pair_sums(most: int, zero: int) -> tuple[bool, ...] | None:
    """How codes of up to `most` are multiplied: by `ByteDots` (None), or by `PairDots` with a `run` of the tuple's length.

    An empty tuple stands for codes less 128, where that is the zero: offsets are not added then.
    """
    fitting = pairs_that_fit(most)
    if fitting or (zero == 128 and pairs_that_fit(zero)):
        return (True,) * fitting
    return None


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


@intrinsic
def _multiply_tile(
    typingctx,
    half_groups,
    pairs,
    codes,
    scales,
    terms,
    steps,
    tokens,
    token_scales,
    offsets,
    sums,
    token_steps,
    out,
    count,
    first,
):
    """Adds the products of TILE_PANELS panels with TILE_TOKENS tokens over `count` blocks of 32 columns to `out`, float32
    [tokens, 16 * TILE_PANELS], or writes them there if `first`.

    half_groups: a boolean if a group has 16 columns, None if it has 32. pairs: None for `ByteDots`, a tuple of length `run` for
    `PairDots`. The others are int64 addresses (terms: None if there are none) and distances in bytes; steps: from one panel to
    the next of codes and of scales; token_steps: from one token to the next of codes, of scales, and of offsets and sums.
    """
    groups = 1 if isinstance(half_groups, types.NoneType) else 2
    has_terms = not isinstance(terms, types.NoneType)

    def generate(context, builder, signature, args):
        _, _, codes, scales, terms, steps, tokens, token_scales, offsets, sums, token_steps, out, count, first = args
        b = builder
        dots = ByteDots(b) if isinstance(pairs, types.NoneType) else PairDots(b, len(pairs))
        is_centred = isinstance(dots, PairDots) and dots.is_centred
        code_step, scale_step = (b.extract_value(steps, i) for i in range(2))
        token_step, token_scale_step, offset_step = (b.extract_value(token_steps, i) for i in range(3))

        def along(base, step, count):
            places = [base]
            for _ in range(count - 1):
                places.append(b.add(places[-1], step))
            return places

        code_at, scale_at = along(codes, code_step, TILE_PANELS), along(scales, scale_step, TILE_PANELS)
        term_at = along(terms, scale_step, TILE_PANELS) if has_terms else []
        token_at = along(tokens, token_step, TILE_TOKENS)
        token_scale_at = along(token_scales, token_scale_step, TILE_TOKENS)
        offset_at, sum_at = (along(base, offset_step, TILE_TOKENS) for base in (offsets, sums))
        tile = [(p, t) for p in range(TILE_PANELS) for t in range(TILE_TOKENS)]
        totals = {place: alloca_once(b, F32X16) for place in tile}
        for place in tile:
            b.store(ir.Constant(F32X16, [0.0] * LANES), totals[place])

        def block(i):
            at_codes, at_scales = b.mul(i, I64(BLOCK * PANEL)), b.mul(i, I64(groups * 4 * PANEL))
            at_token, at_number, at_offset = b.mul(i, I64(BLOCK)), b.mul(i, I64(4)), b.mul(i, I64(4 * groups))
            parts = {}
            for group in range(groups):
                place = b.add(at_offset, I64(4 * group))
                starts = [constant(I32X16, 0) if is_centred else splat(b, load(b, at, I32, place)) for at in offset_at]
                exact = {(p, t): starts[t] for p, t in tile}
                words = range(group * 8 // groups, (group + 1) * 8 // groups)
                partial: dict = {}
                for k in words:
                    place = b.add(at_codes, I64(4 * PANEL * k))
                    weights = [dots.unsigned(load(b, code_at[p], I32X16, place)) for p in range(TILE_PANELS)]
                    for t in range(TILE_TOKENS):
                        word = dots.signed_word(load(b, token_at[t], I32, b.add(at_token, I64(4 * k))))
                        for p in range(TILE_PANELS):
                            if isinstance(dots, ByteDots):
                                exact[p, t] = dots.add(exact[p, t], weights[p], word)
                                continue
                            partial[p, t] = dots.add_pairs(partial.get((p, t)), weights[p], word)
                            if (k - words[0]) % dots.run == dots.run - 1 or k == words[-1]:
                                exact[p, t] = dots.widen(exact[p, t], partial.pop((p, t)))
                for p in range(TILE_PANELS):
                    scale = load(b, scale_at[p], F32X16, b.add(at_scales, I64(4 * PANEL * group)))
                    for t in range(TILE_TOKENS):
                        number = b.sitofp(exact[p, t], F32X16)
                        parts[p, t] = fma(b, number, scale, parts[p, t]) if group else b.fmul(number, scale)
            for t in range(TILE_TOKENS):
                scale = splat(b, load(b, token_scale_at[t], F32, at_number))
                for p in range(TILE_PANELS):
                    b.store(fma(b, parts[p, t], scale, b.load(totals[p, t])), totals[p, t])
            if not has_terms:
                return
            for group in range(groups):
                for p in range(TILE_PANELS):
                    term = load(b, term_at[p], F32X16, b.add(at_scales, I64(4 * PANEL * group)))
                    for t in range(TILE_TOKENS):
                        total = splat(b, load(b, sum_at[t], F32, b.add(at_offset, I64(4 * group))))
                        b.store(fma(b, term, total, b.load(totals[p, t])), totals[p, t])

        loop(b, count, block)
        fresh = splat(b, first, LANES)
        for p, t in tile:
            at = 4 * PANEL * (TILE_PANELS * t + p)
            old = b.select(fresh, ir.Constant(F32X16, [0.0] * LANES), load(b, out, F32X16, at))
            store(b, b.fadd(b.load(totals[p, t]), old), out, at)
        return context.get_dummy_value()

    i = types.int64
    two, three = types.UniTuple(i, 2), types.UniTuple(i, 3)
    maybe = i if has_terms else terms
    return types.void(half_groups, pairs, i, i, maybe, two, i, i, i, i, three, i, i, types.boolean), generate


@kernel
def multiply_bytes(half_groups, pairs, codes, scales, terms, tokens, token_scales, offsets, totals, sums, out, column):
    """out[t, column + r] = sum over groups g of
    scale[g, r] * token scale[t, g] * (sum of code * token code + offset[t, g]) + term[g, r] * total[t, g].

    half_groups: True if groups have 16 columns, None if 32. pairs: what pair_sums says of the codes. codes: uint8 [panels,
    columns / 4, 16, 4], panels a multiple of 2; scales and terms (or None): float32 [panels, groups, 16]. tokens: int8 [n,
    columns], n a multiple of TILE_TOKENS, token_scales: float32 [n, columns / 32], offsets: int32 [n, groups], totals: float32
    [n, groups]. sums: float32 [pairs, tokens, 32], working memory. out: float32 [n or less, any]: rows of the panels beyond its
    last column are left out. All C-contiguous.
    """
    n, columns = tokens.shape
    groups = 2 if half_groups is not None else 1
    blocks = columns // BLOCK
    code_step, scale_step = columns * PANEL, blocks * groups * 4 * PANEL
    token_steps = (columns, 4 * blocks, 4 * groups * blocks)
    at_codes, at_scales, at_sums = address(codes), address(scales), address(sums)
    at_terms = address(terms) if terms is not None else None
    at_tokens, at_token_scales = address(tokens), address(token_scales)
    at_offsets, at_totals = address(offsets), address(totals)
    tiles = sums.shape[0] * 2 // TILE_PANELS
    token_tile = sums.shape[1] // TILE_TOKENS * TILE_TOKENS
    tile_step = token_tile * 4 * PANEL * TILE_PANELS
    for token in range(0, n, token_tile):
        count = min(token_tile, n - token)
        for panel in range(0, codes.shape[0], tiles * TILE_PANELS):
            n_tiles = min(tiles, (codes.shape[0] - panel) // TILE_PANELS)
            for start in range(0, blocks, COLUMN_TILE // BLOCK):
                width = min(COLUMN_TILE // BLOCK, blocks - start)
                for tile in range(n_tiles):
                    first = panel + tile * TILE_PANELS
                    scale_offset = first * scale_step + start * groups * 4 * PANEL
                    for t in range(token, token + count, TILE_TOKENS):
                        group_offset = t * token_steps[2] + start * groups * 4
                        _multiply_tile(
                            half_groups,
                            pairs,
                            at_codes + first * code_step + start * BLOCK * PANEL,
                            at_scales + scale_offset,
                            at_terms + scale_offset if at_terms is not None else None,
                            (code_step, scale_step),
                            at_tokens + t * token_steps[0] + start * BLOCK,
                            at_token_scales + t * token_steps[1] + start * 4,
                            at_offsets + group_offset,
                            at_totals + group_offset,
                            token_steps,
                            at_sums + tile * tile_step + (t - token) * 4 * PANEL * TILE_PANELS,
                            width,
                            start == 0,
                        )
            size = PANEL * TILE_PANELS
            tiles_sums = sums.reshape(-1)[: n_tiles * token_tile * size].reshape((n_tiles, token_tile, size))
            write_sums(tiles_sums, out, token, min(count, out.shape[0] - token), column + panel * PANEL, out.shape[1])
