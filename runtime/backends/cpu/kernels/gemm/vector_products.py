"""Matrix products of float panels on vector registers: float32 with fused multiply-add, or bf16 pairs with AVX512-BF16.

A register tile is TILE_PANELS panels of 16 weight rows times TILE_TOKENS tokens. Every element of the result is the sum of
partial sums over COLUMN_TILE words of a panel's row each (256 columns of float32, 512 of bf16), in the order of the columns;
within one, products are added one after the other. So an element depends on its row, its token and the number of columns alone:
not on the number of tokens or threads, nor on how rows or tokens are divided into tiles.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic, kernel
from ......simd.instructions.x86 import vdpbf16ps
from ......simd.llvm import F32X16, I32X16, I64, LANES, fma, load, loop, prefetch, splat, store
from ......simd.memory import address
from ......simd.target import Forms, target
from .byte_tiles import PANEL
from .float_panels import STEP

COLUMN_TILE = 256  # 32-bit words of a panel's row that are multiplied at a time for all tokens: of two panels 32 KiB
# (panels, tokens) of a register tile: 24 of AVX-512's 32 registers are sums, 12 of AVX2's 16, 24 of NEON's 32.
TILES: Forms[tuple[int, int]] = ((("avx512f",), (2, 12)), (("avx2",), (1, 6)), (("neon",), (1, 6)), ((), (1, 2)))
TILE_PANELS, TILE_TOKENS = target().choose(TILES)
_TOKEN_ROWS = 132  # most tokens whose COLUMN_TILE words are multiplied by one pair of panels after the other: 132 KiB
BLOCK_TOKENS = 12  # tokens of a block of activations: a multiple of TILE_TOKENS on every processor
_VECTOR_BYTES = 4 * LANES
_AHEAD = 2048  # bytes from weights that are multiplied to those that are asked for


def has_bf16_dots() -> bool:
    """Whether the processor has dot products of bf16 pairs on vector registers that are worth using. (Those of processors that
    have the tile unit take twice as long as float32 would: 55 against 110 to 150 G multiplications per second.)"""
    return target().has_bf16_dots and not target().has("amx-bf16")


def _multiply_add(b, of, total, weights, token):
    """total + weights * token, <16 x float>: fused where the processor can (a call of the C library per element elsewhere)."""
    if of.has_fma:
        return fma(b, weights, token, total)
    return b.fadd(total, b.fmul(weights, token))


def write_tile(b, of, pairs, half, weights, weight_step, tokens, sums, steps, first):
    """LLVM code that adds the products of a tile's panels and tokens over `steps` times 32 columns to sums, float32 rows of 32
    (first, an i1: writes them there).

    pairs: whether numbers are pairs of bf16, else float32; half: for half as many tokens. The others are int64, addresses and
    bytes; weight_step: from one panel to the next; tokens: the place of the first one in its block.
    """
    panels, count = of.choose(TILES)
    count = count // 2 if half else count
    words = STEP // 2 if pairs else STEP  # per step
    kind = I32X16 if pairs else F32X16
    tile = [(t, p) for t in range(count) for p in range(panels)]
    zero = ir.Constant(F32X16, [0.0] * LANES)
    totals = {place: alloca_once(b, F32X16) for place in tile}
    for total in totals.values():
        b.store(zero, total)
    places = [weights, b.add(weights, weight_step)][:panels]

    def step(i):
        at_weights, at_tokens = b.mul(i, I64(words * _VECTOR_BYTES)), b.add(tokens, b.mul(i, I64(4 * words * BLOCK_TOKENS)))
        rows = [b.add(place, at_weights) for place in places]
        for word in range(words):
            factors = [load(b, row, kind, word * _VECTOR_BYTES) for row in rows]
            for row in rows if pairs else ():  # bf16_r16 is multiplied where it lies in memory
                prefetch(b, row, word * _VECTOR_BYTES + _AHEAD, 2)
            for t in range(count):
                token = splat(b, load(b, at_tokens, kind.element, 4 * (words * t + word)))
                for p in range(panels):
                    total = b.load(totals[t, p])
                    if pairs:
                        total = vdpbf16ps(b, total, factors[p], token)
                    else:
                        total = _multiply_add(b, of, total, factors[p], token)
                    b.store(total, totals[t, p])

    loop(b, steps, step)
    fresh = splat(b, first)
    for t, p in tile:
        at = b.add(sums, I64(_VECTOR_BYTES * (2 * t + p)))
        store(b, b.fadd(b.load(totals[t, p]), b.select(fresh, zero, load(b, at, F32X16))), at)


@intrinsic
def _register_tile(typingctx, bf16, half, weights, weight_step, tokens, sums, steps, first):
    """`write_tile` for this process. bf16: a boolean for pairs of bf16, None for float32; half: a boolean or None."""
    pairs, is_half = (not isinstance(flag, types.NoneType) for flag in (bf16, half))

    def generate(context, builder, signature, args):
        write_tile(builder, target(), pairs, is_half, *args[2:])
        return context.get_dummy_value()

    i = types.int64
    return types.void(bf16, half, i, i, i, i, i, types.boolean), generate


@kernel
def _multiply_pair(bf16, half, weights, panel_bytes, second, tokens, sums, steps, first):
    """Two panels, or a single one without a `second`, times the tokens of a tile; addresses and bytes."""
    if TILE_PANELS == 2:
        _register_tile(bf16, half, weights, panel_bytes if second else 0, tokens, sums, steps, first)
    else:
        _register_tile(bf16, half, weights, 0, tokens, sums, steps, first)
        if second:
            _register_tile(bf16, half, weights + panel_bytes, 0, tokens, sums + 4 * PANEL, steps, first)


@kernel
def add_products(bf16, panels, panel_bytes, count, tokens, rows, first, steps, sums):
    """sums[pair, t, r] += sum over c of row r, column c of a pair of panels times token t, column 32 * first + c.

    bf16: None for float32, True for bf16 (as uint16) where `has_bf16_dots`. panels: address of `count` panels, panel_bytes
    apart, from the column 32 * first on; tokens: [blocks, parts, columns / 32, BLOCK_TOKENS, 32] of the same kind, whose
    parts are added up, of which the first `rows` tokens count; steps: of 32 columns; sums: float32 [pairs of panels, tokens,
    32], at a cache line, written to where first is 0. All C-contiguous; `first` is a multiple of COLUMN_TILE words.
    """
    parts, words = tokens.shape[1], STEP // 2 if bf16 is not None else STEP
    step_bytes, token_step = words * PANEL * 4, words * 4
    part_bytes = tokens.shape[2] * words * 4 * BLOCK_TOKENS
    block_bytes, sum_bytes = parts * part_bytes, sums.shape[1] * 8 * PANEL
    at_tokens, at_sums = address(tokens), address(sums)
    group = -(-rows // -(-rows // _TOKEN_ROWS) // BLOCK_TOKENS) * BLOCK_TOKENS  # evenly divided, so that none is a small rest
    for token in range(0, rows, group):
        stop = min(token + group, rows)
        for start in range(0, steps, COLUMN_TILE // words):
            width = min(COLUMN_TILE // words, steps - start)
            for pair in range((count + 1) // 2):
                weights = panels + 2 * pair * panel_bytes + start * step_bytes
                second = 2 * pair + 1 < count
                for part in range(parts):
                    source = at_tokens + part * part_bytes + (first + start) * 4 * words * BLOCK_TOKENS
                    fresh = first + start == 0 and part == 0
                    for t in range(token, stop, TILE_TOKENS):
                        at = source + t // BLOCK_TOKENS * block_bytes + t % BLOCK_TOKENS * token_step
                        to = at_sums + pair * sum_bytes + t * 8 * PANEL
                        if stop - t > TILE_TOKENS // 2:
                            _multiply_pair(bf16, None, weights, panel_bytes, second, at, to, width, fresh)
                        else:
                            _multiply_pair(bf16, True, weights, panel_bytes, second, at, to, width, fresh)
