"""LLVM code for what a matrix product of 8-bit codes computes in registers at a time, a tile of panels and tokens.

A panel holds the codes of 16 rows, the same CODE_COLUMNS columns of all rows together: four, which is what one instruction of
AVX-512 VNNI multiplies with four columns of a token, or eight for NEON's products of matrices. Codes are unsigned, and a group
of columns (16, 32 or 256) has per row a scale and perhaps a term that is added: weight = scale * (code - zero) + term. Products
of codes are exact integers; each group's is turned to float32, scaled and added up, group after group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic
from ......simd.instructions import arm
from ......simd.instructions.dot_products import ByteDots, PairDots, add_word_pairs, byte_dots_bias, pairs_that_fit
from ......simd.llvm import (
    F32,
    F32X16,
    I8,
    I8X64,
    I16X32,
    I32,
    I32X16,
    I64,
    LANES,
    concat,
    constant,
    fma,
    load,
    loop,
    shuffle,
    splat,
    split_vector,
    store,
    undefined,
    vector,
)
from ......simd.target import Forms, Target, target
from ..activations import RUN

PANEL = 16  # rows
BLOCK = 32  # columns that share an activation's scale, or as many as a scale of the weights if those are more
COLUMN_TILE = 512  # columns multiplied at a time for all tokens: the codes of two panels then stay in the first-level cache


class Tile(NamedTuple):
    """What is computed in registers: the products of so many panels with so many tokens, with two sums for each of them, one of
    integers and one of floats.

    together  tokens whose sums share a vector of sixteen lanes, those of a row side by side: 2 where matrices of 2 by 8 codes
              are multiplied, else 1
    rolled    the columns of a block are a loop: where products take several instructions, LLVM would begin more of them than
              there are registers for
    """

    panels: int
    tokens: int
    together: int = 1
    rolled: bool = False

    @property
    def rows(self) -> int:
        """Of a panel that are taken at a time."""
        return LANES // self.together

    @property
    def columns(self) -> int:
        """Columns of a row whose codes lie side by side in a panel."""
        return 4 * self.together

    @property
    def few(self) -> int:
        """Tokens of a smaller tile for the last ones: the products of a row and a token are the same."""
        return max(self.together, self.tokens // 3)


TILES: Forms[Tile] = (
    (("avx512f",), Tile(2, 6)),
    (("neon", "i8mm"), Tile(1, 4, 2)),
    (("neon", "dotprod"), Tile(1, 3)),
    (("neon",), Tile(1, 3, rolled=True)),
    (("avxvnni",), Tile(1, 3)),
    (("avx2",), Tile(1, 6)),
    ((), Tile(1, 3)),
)
_TILE = target().choose(TILES)
TILE_PANELS, TILE_TOKENS, CODE_COLUMNS, FEW_TOKENS = _TILE.panels, _TILE.tokens, _TILE.columns, _TILE.few


def code_bias(of: Target) -> int:
    """What is subtracted from the codes of panels: 128 where products are those of signed bytes."""
    return byte_dots_bias(of)


CODE_BIAS = code_bias(target())


def pair_sums(most: int, of: Target | None = None) -> tuple[bool, ...] | None:
    """How codes of up to `most` are multiplied: by `ByteDots` (None), by `PairDots` with a `run` of the tuple's length, or, if
    that is 0, as 16-bit numbers, less the code that stands for 0: no more multiplications than of pairs of bytes whose sums are
    widened one by one, and none to make bytes unsigned."""
    run = pairs_that_fit(most, of)
    return None if run is None else (True,) * (run if run > 1 else 0)


def write_tile(
    b: Any, of: Target, few: bool, group: int, span: int, run: int | None, codes: Any, scales: Any, terms: Any, tokens: Any,
    token_scales: Any, offsets: Any, sums: Any, before: Any, out: Any, out_step: Any, count: Any, first: Any,
) -> None:  # fmt: skip
    """LLVM code that writes the products of a tile over `count` blocks of columns (of 32, or groups of more) to `out`, 16 *
    panels float32 a token, added to those at `before`, float32 [tokens, 16 * panels], unless `first` (an i1).

    few: for `Tile.few` tokens; group: columns that share a scale; span: those that share one of the activations, 32 (of any
    group) or 256 (of groups of 256); run: None for `ByteDots`, else that of `PairDots`; 0 for
    16-bit numbers, of weights in lines of two columns, less their zeros, and of tokens. The others are int64 addresses (terms:
    None if there are none); out_step: bytes from one token's results to the next one's. Panels and tokens lie COLUMN_TILE
    columns apart, so that one register serves the addresses of all.
    """
    tile, zero = of.choose(TILES), constant(F32X16, 0.0)
    n_tokens = tile.few if few else tile.tokens
    words = run == 0
    if words:
        exact_sums: Any = _word_products
    elif run is not None:
        exact_sums = partial(_pair_products, run=run)
    elif tile.rolled:
        exact_sums = _rolled_dot_products
    else:
        exact_sums = _dot_products if tile.together == 1 else _matrix_products

    def along(base: Any, step: Any, count: int) -> list[Any]:
        return [base] + [b.add(base, b.mul(I64(i), step)) for i in range(1, count)]

    def by_tokens(base: Any, step: int) -> list[list[Any]]:
        places = along(base, I64(step), n_tokens)
        return [places[t : t + tile.together] for t in range(0, n_tokens, tile.together)]

    groups = max(1, span // group)  # of a scale of the activations
    code_bytes, scale_bytes, group_bytes = COLUMN_TILE << words, 4 * COLUMN_TILE // span, 4 * groups * COLUMN_TILE // span
    panel_scale_bytes = 4 * PANEL * COLUMN_TILE // group

    def of_rows(at: Any, place: Any) -> Any:
        value = load(b, at, vector(F32, tile.rows), place)
        return value if tile.together == 1 else shuffle(b, value, None, [lane // tile.together for lane in range(LANES)])

    def of_tokens(places: list[Any], ir_type: ir.Type, place: Any) -> Any:
        """One number in all lanes, or those of two tokens in turn."""
        if len(places) == 1:
            return splat(b, load(b, places[0], ir_type, place))
        both = undefined(vector(F32, 2))
        for i, at in enumerate(places):
            both = b.insert_element(both, load(b, at, F32, place), I32(i))
        # As one number of 64 bits it is copied to all lanes at once.
        pair = b.extract_element(b.bitcast(both, vector(I64, 1)), I32(0))
        return b.bitcast(splat(b, pair, LANES // 2), vector(ir_type, LANES))

    token_at, token_scale_at = by_tokens(tokens, code_bytes), by_tokens(token_scales, scale_bytes)
    offset_at, sum_at = (by_tokens(base, group_bytes) for base in (offsets, sums))
    pairs = [(p, t) for p in range(tile.panels) for t in range(len(token_at))]
    totals = {pair: alloca_once(b, F32X16) for pair in pairs}

    def multiply_rows(row: Any) -> None:
        """row: the first one within a panel, an i64 or 0."""
        at_codes, at_scales, at_terms = codes, scales, terms
        if tile.together > 1:
            at_codes, at_scales = b.add(codes, b.mul(row, I64(tile.columns))), b.add(scales, b.mul(row, I64(4)))
            at_terms = None if terms is None else b.add(terms, b.mul(row, I64(4)))
        code_at = along(at_codes, I64(PANEL * code_bytes), tile.panels)
        scale_at = along(at_scales, I64(panel_scale_bytes), tile.panels)
        term_at = [] if terms is None else along(at_terms, I64(panel_scale_bytes), tile.panels)
        for pair in pairs:
            b.store(zero, totals[pair])

        def sums_of_span(starts: dict, codes: Any, token: Any) -> dict:
            """starts + the products of a group of several blocks, one after the other."""
            places = {pair: alloca_once(b, I32X16) for pair in pairs}
            for pair, place in places.items():
                b.store(starts[pair], place)

            def add_block(i: Any) -> None:
                before = {pair: b.load(place) for pair, place in places.items()}
                at, token_place = (
                    b.add(codes, b.mul(i, I64(BLOCK * PANEL << words))),
                    b.add(token, b.mul(i, I64(BLOCK << words))),
                )
                columns = range(0, BLOCK, tile.columns)
                for pair, total in exact_sums(b, of, before, code_at, at, token_at, token_place, columns).items():
                    b.store(total, places[pair])

            loop(b, I64(span // BLOCK), add_block)
            return {pair: b.load(place) for pair, place in places.items()}

        def block(i: Any) -> None:
            codes, scales = b.mul(i, I64(span * PANEL << words)), b.mul(i, I64(groups * 4 * PANEL))
            token, number, offset = b.mul(i, I64(span << words)), b.mul(i, I64(4)), b.mul(i, I64(4 * groups))
            parts = {}
            for g in range(groups):
                place = b.add(offset, I64(4 * g))
                of_token = [constant(I32X16, 0) if words else of_tokens(at, I32, place) for at in offset_at]
                starts = {(p, t): of_token[t] for p, t in pairs}
                if span > BLOCK:
                    exact = sums_of_span(starts, codes, token)
                else:
                    exact = exact_sums(
                        b, of, starts, code_at, codes, token_at, token, range(g * group, (g + 1) * group, tile.columns)
                    )
                for p in range(tile.panels):
                    scale = of_rows(scale_at[p], b.add(scales, I64(4 * PANEL * g)))
                    for t in range(len(token_at)):
                        integers = b.sitofp(exact[p, t], F32X16)
                        parts[p, t] = fma(b, integers, scale, parts[p, t]) if g else b.fmul(integers, scale)
            for t, at in enumerate(token_scale_at):
                scale = of_tokens(at, F32, number)
                for p in range(tile.panels):
                    b.store(fma(b, parts[p, t], scale, b.load(totals[p, t])), totals[p, t])
            if terms is None:
                return
            for g in range(groups):
                for p in range(tile.panels):
                    term = of_rows(term_at[p], b.add(scales, I64(4 * PANEL * g)))
                    for t, at in enumerate(sum_at):
                        total = of_tokens(at, F32, b.add(offset, I64(4 * g)))
                        b.store(fma(b, term, total, b.load(totals[p, t])), totals[p, t])

        def group_of_spans(i: Any) -> None:
            """The sums of a group with a scale of the activations for each of its spans: exact ones times these, then times the
            scale of the weights."""
            places = {pair: alloca_once(b, F32X16) for pair in pairs}
            for place in places.values():
                b.store(zero, place)

            def add_span(j: Any) -> None:
                number = b.add(b.mul(i, I64(group // span)), j)
                codes, token = b.mul(number, I64(span * PANEL << words)), b.mul(number, I64(span << words))
                number = b.mul(number, I64(4))
                of_token = [constant(I32X16, 0) if words else of_tokens(at, I32, number) for at in offset_at]
                starts = {(p, t): of_token[t] for p, t in pairs}
                exact = exact_sums(b, of, starts, code_at, codes, token_at, token, range(0, span, tile.columns))
                for t, at in enumerate(token_scale_at):
                    scale = of_tokens(at, F32, number)
                    for p in range(tile.panels):
                        place = places[p, t]
                        b.store(fma(b, b.sitofp(exact[p, t], F32X16), scale, b.load(place)), place)

            loop(b, I64(group // span), add_span)
            for p in range(tile.panels):
                scale = of_rows(scale_at[p], b.mul(i, I64(4 * PANEL)))
                for t in range(len(token_at)):
                    b.store(fma(b, b.load(places[p, t]), scale, b.load(totals[p, t])), totals[p, t])

        loop(b, count, block if span >= group else group_of_spans)
        fresh = splat(b, first, tile.rows)
        none = constant(vector(F32, tile.rows), 0.0)
        at, to = (base if tile.together == 1 else b.add(base, b.mul(row, I64(4))) for base in (before, out))
        places = along(to, out_step, n_tokens)
        for p, t in pairs:
            total = b.load(totals[p, t])
            for i in range(tile.together):
                token = tile.together * t + i
                value = total if tile.together == 1 else shuffle(b, total, None, range(i, LANES, tile.together))
                sum_before = b.select(fresh, none, load(b, at, none.type, 4 * PANEL * (tile.panels * token + p)))
                store(b, b.fadd(value, sum_before), places[token], 4 * PANEL * p)

    if tile.together == 1:
        multiply_rows(0)
    else:
        loop(b, I64(tile.together), lambda part: multiply_rows(b.mul(part, I64(tile.rows))))


def _dot_products(
    b: Any, of: Target, starts: dict, code_at: list, codes: Any, token_at: list, token: Any, columns: range
) -> dict:
    """(panel, number of the token) -> <16 x i32>: starts (as the result) + the products over some columns of a block.

    code_at, token_at: addresses of the panels, and lists of one or two of tokens; codes, token: bytes from there to the block.
    """
    dots, words = ByteDots(b, of, 127 if code_bias(of) else 255), {}
    exact = dict(starts)
    for column in columns:
        place = b.add(codes, I64(PANEL * column))
        weights = [dots.unsigned(load(b, at, I32X16, place)) for at in code_at]
        for t, (at,) in enumerate(token_at):
            if not of.has("neon"):
                word = load(b, at, I32, b.add(token, I64(column)))
            else:  # products with one lane of a register are one instruction
                four = column // 16 * 16
                if (t, four) not in words:
                    words[t, four] = load(b, at, vector(I32, 4), b.add(token, I64(four)))
                word = b.extract_element(words[t, four], I32((column - four) // 4))
            signed = dots.signed_word(word)
            for p in range(len(code_at)):
                exact[p, t] = dots.add(exact[p, t], weights[p], signed)
    return exact


def _rolled_dot_products(
    b: Any, of: Target, starts: dict, code_at: list, codes: Any, token_at: list, token: Any, columns: range
) -> dict:
    """As _dot_products, as a loop."""
    dots = ByteDots(b, of, 127 if code_bias(of) else 255)
    sums = {pair: alloca_once(b, I32X16) for pair in starts}
    for pair, place in sums.items():
        b.store(starts[pair], place)

    def four_columns(i: Any) -> None:
        column = b.add(b.mul(i, I64(columns.step)), I64(columns.start))
        at_codes, at_token = b.add(codes, b.mul(column, I64(PANEL))), b.add(token, column)
        weights = [dots.unsigned(load(b, at, I32X16, at_codes)) for at in code_at]
        for t, (at,) in enumerate(token_at):
            signed = dots.signed_word(load(b, at, I32, at_token))
            for p, codes_of_panel in enumerate(weights):
                b.store(dots.add(b.load(sums[p, t]), codes_of_panel, signed), sums[p, t])

    loop(b, I64(len(columns)), four_columns)
    return {place: b.load(total) for place, total in sums.items()}


def _pair_products(
    b: Any, of: Target, starts: dict, code_at: list, codes: Any, token_at: list, token: Any, columns: range, run: int
) -> dict:
    """As _dot_products, with sums of so many products of pairs as 16-bit numbers."""
    dots = PairDots(b, run, of)
    exact = dict(starts)

    def four_columns(at_codes: Any, at_token: Any, sums: dict) -> None:
        weights = [dots.unsigned(load(b, at, I32X16, at_codes)) for at in code_at]
        for t, (at,) in enumerate(token_at):
            word = dots.signed_word(load(b, at, I32, at_token))
            for p, codes_of_panel in enumerate(weights):
                b.store(dots.add_pairs(b.load(sums[p, t]), codes_of_panel, word), sums[p, t])

    for first in range(columns.start, columns.stop, 4 * run):
        part = range(first, min(first + 4 * run, columns.stop), 4)
        nothing = {pair: constant(I16X32, 0) for pair in starts}
        sums = _summed(b, nothing, part, code_at, codes, PANEL, token_at, token, 1, four_columns)
        exact = {place: dots.widen(total, sums[place]) for place, total in exact.items()}
    return exact


def _word_products(
    b: Any, of: Target, starts: dict, code_at: list, codes: Any, token_at: list, token: Any, columns: range
) -> dict:
    """As _dot_products, of 16-bit numbers, two columns at a time."""

    def two_columns(at_codes: Any, at_token: Any, sums: dict) -> None:
        weights = [load(b, at, I16X32, at_codes) for at in code_at]
        for t, (at,) in enumerate(token_at):
            word = b.bitcast(splat(b, load(b, at, I32, at_token)), I16X32)
            for p, numbers in enumerate(weights):
                b.store(add_word_pairs(b, b.load(sums[p, t]), numbers, word, of), sums[p, t])

    part = range(columns.start, columns.stop, 2)
    return _summed(b, starts, part, code_at, codes, 2 * PANEL, token_at, token, 2, two_columns)


def _summed(
    b: Any, starts: dict, columns: range, code_at: list, codes: Any, code_step: int, token_at: list, token: Any,
    token_step: int, add: Callable[[Any, Any, dict], None],
) -> dict:  # fmt: skip
    """(panel, token) -> starts + what `add` adds up over some columns, as a loop: unrolled, LLVM would load more than there are
    registers for. add(distance of the codes, distance of the tokens' codes, places of the sums); code_step, token_step: bytes
    of a column."""
    sums = {pair: alloca_once(b, start.type) for pair, start in starts.items()}
    for pair, place in sums.items():
        b.store(starts[pair], place)

    def body(i: Any) -> None:
        column = b.add(b.mul(i, I64(columns.step)), I64(columns.start))
        add(b.add(codes, b.mul(column, I64(code_step))), b.add(token, b.mul(column, I64(token_step))), sums)

    loop(b, I64(len(columns)), body)
    return {place: b.load(total) for place, total in sums.items()}


def _matrix_products(
    b: Any, of: Target, starts: dict, code_at: list, codes: Any, token_at: list, token: Any, columns: range
) -> dict:
    """As _dot_products, in matrices of two rows by two tokens: (0, number of the two tokens) -> their sums, row after row."""
    exact, tokens = {t: split_vector(b, start, 4) for (_, t), start in starts.items()}, {}
    for column in columns:
        weights = split_vector(b, load(b, code_at[0], I8X64, b.add(codes, I64(PANEL * column))), 4)
        for t, places in enumerate(token_at):
            first = column // 16 * 16
            if (t, first) not in tokens:
                low, high = (load(b, at, vector(I64, 2), b.add(token, I64(first))) for at in places)
                tokens[t, first] = [b.bitcast(shuffle(b, low, high, [i, 2 + i]), vector(I8, 16)) for i in range(2)]
            pair = tokens[t, first][(column - first) // 8]
            exact[t] = [arm.usmmla(b, total, weight, pair) for total, weight in zip(exact[t], weights, strict=True)]
    return {(0, t): concat(b, sums) for t, sums in exact.items()}


@intrinsic
def multiply_tile(
    typingctx,
    few,
    runs,
    token_runs,
    pairs,
    codes,
    scales,
    terms,
    tokens,
    token_scales,
    offsets,
    sums,
    before,
    out,
    out_step,
    count,
    first,
):
    """`write_tile` for this process. few: a boolean or None; runs, token_runs: tuples as long as a group and a
    scale of the activations have runs of 16 columns; pairs: None, or a tuple of length `run`."""
    is_few = not isinstance(few, types.NoneType)
    has_terms = not isinstance(terms, types.NoneType)

    def generate(context, builder, signature, args):
        codes, scales, terms, *rest = args[4:]
        run = None if isinstance(pairs, types.NoneType) else len(pairs)
        terms = terms if has_terms else None
        write_tile(builder, target(), is_few, RUN * len(runs), RUN * len(token_runs), run, codes, scales, terms, *rest)
        return context.get_dummy_value()

    i = types.int64
    maybe = i if has_terms else terms
    return types.void(few, runs, token_runs, pairs, i, i, maybe, i, i, i, i, i, i, i, i, types.boolean), generate
