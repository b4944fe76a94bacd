"""Run by test_levels.py with GGUFMILL_CPU set: does every operation on lanes and bytes once, and saves the results."""

import sys

import numpy as np
from numba import types

from ggufmill.simd.block_reductions import block_extremes, block_farthest, block_magnitude, has_nan
from ggufmill.simd.byte_lanes import (
    bytes_from_words,
    i8_to_float,
    load_bytes,
    load_u64,
    lookup_bytes,
    store_bytes,
    store_nibbles,
)
from ggufmill.simd.compile import intrinsic, kernel
from ggufmill.simd.exponential import exp, exp_lanes
from ggufmill.simd.instructions.dot_products import add_byte_dots, add_word_pairs, byte_pairs
from ggufmill.simd.instructions.permute import lookup_bytes as lookup_constant_bytes
from ggufmill.simd.lanes import (
    fma_lanes,
    fold_sum,
    load,
    load_half,
    reduce_max,
    reduce_sum,
    round_product_lanes,
    round_to_half,
    sqrt_lanes,
    store,
    store_half,
    trunc_lanes,
)
from ggufmill.simd.llvm import I8X64, I32X16
from ggufmill.simd.llvm import load as load_vector
from ggufmill.simd.llvm import store as store_vector
from ggufmill.simd.memory import address
from ggufmill.simd.table_lookup import lookup_lanes, nearest_entry16, nearest_entry64
from ggufmill.simd.target import target

TABLE = [(37 * i + 11) % 256 for i in range(50)]


@intrinsic
def integers(typingctx, unsigned, signed, out):
    """Five vectors of 64 bytes: dot products of wide and of small codes, pairs, products of pairs, look-ups of bytes."""

    def code(context, builder, signature, args):
        u, s = (load_vector(builder, arg, I8X64) for arg in args[:2])
        small, ones = builder.lshr(u, I8X64([1] * 64)), I32X16([1] * 16)
        pairs = byte_pairs(builder, small, s)
        results = [add_byte_dots(builder, ones, u, s, 255), add_byte_dots(builder, ones, small, s, 128), pairs]
        results += [
            add_word_pairs(builder, ones, pairs, pairs),
            lookup_constant_bytes(builder, TABLE, builder.lshr(u, I8X64([3] * 64))),
        ]
        for i, result in enumerate(results):
            store_vector(builder, builder.bitcast(result, I32X16), args[2], 64 * i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


@kernel
def run(x, y, table, codes, halves, unsigned, signed, out, bytes_out, halves_out, dots):
    a, b = load(x, 0), load(y, 0)
    index = abs(load(codes, 0))
    store(out, 0, fma_lanes(a, b, a) / (b + 3) - sqrt_lanes(abs(b)))
    store(out, 16, round_to_half(a * b))
    store(out, 32, round_product_lanes(a, b) + trunc_lanes(a * 100))
    store(out, 48, exp_lanes(a))
    store(out, 64, load_half(halves, 0))
    store(out, 80, lookup_lanes(table, index))
    store(out, 128, nearest_entry16(a, table, table, bytes_out, 0))
    store(out, 144, nearest_entry64(b, table, table, bytes_out, 16))
    words = bytes_from_words(load_u64(unsigned, 3), load_u64(unsigned, 9))
    store(out, 160, i8_to_float(words) * i8_to_float(load_bytes(unsigned, 7)))
    store_bytes(bytes_out, 32, lookup_bytes(load_bytes(unsigned, 1), load_bytes(codes, 0) & 15))
    out[176], out[177], out[178] = reduce_sum(a), fold_sum(b), reduce_max(a)
    out[179] = exp(x[5])
    store_half(halves_out, 0, a * 1e-6)
    integers(address(unsigned), address(signed), address(dots))


@kernel
def of_blocks(blocks, out, nibbles):
    least, largest = block_extremes(blocks, 0)
    negative, positive = block_farthest(blocks, 0)
    store(out, 0, least)
    store(out, 16, largest)
    store(out, 32, negative)
    store(out, 48, positive)
    store(out, 64, block_magnitude(blocks, 0))
    a, b = abs(load(blocks, 32)) * 4, abs(load(blocks, 48)) * 4
    marks = store_nibbles(nibbles, 0, 16, a, b, b, a, a, a, b, b)
    out[80], out[81] = has_nan(marks), has_nan(store_nibbles(nibbles, 64, 16, a, b, a / 0 * 0, a, a, a, b, b))


random = np.random.default_rng(0)
x, y = (random.standard_normal(16).astype(np.float32) * 3 for _ in range(2))
table = np.sort(random.standard_normal(64).astype(np.float32))
codes = np.concatenate([random.integers(0, 16, 16), random.integers(0, 64, 16)]).astype(np.uint8)
halves = random.standard_normal(16).astype(np.float16).view(np.uint16)
unsigned, signed = random.integers(0, 256, 64).astype(np.uint8), random.integers(-127, 128, 64).astype(np.int8)
out, bytes_out, halves_out = np.zeros(192, np.float32), np.zeros(48, np.uint8), np.zeros(16, np.uint16)
dots = np.zeros(80, np.int32)
run(x, y, table, codes, halves, unsigned, signed, out, bytes_out, halves_out, dots)
# Zeros of either sign alone in every second block: which of them counts must not depend on the processor either.
blocks = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
blocks[::2] = np.copysign(np.float32(0), blocks[::2])
extremes, nibbles = np.zeros(96, np.float32), np.zeros(128, np.uint8)
of_blocks(blocks.reshape(-1), extremes, nibbles)
np.savez(
    sys.argv[1],
    out=out.view(np.uint32),
    bytes_out=bytes_out,
    halves_out=halves_out,
    dots=dots,
    extremes=extremes.view(np.uint32),
    nibbles=nibbles[:64],  # what NaN becomes is not said
    level=np.array(target().level),
)
