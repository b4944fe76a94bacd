"""Lanes do what the same float32 operations do one by one."""

import numpy as np
import pytest
from numba import types

from ggufmill.simd import llvm
from ggufmill.simd.compile import intrinsic, kernel
from ggufmill.simd.lanes import (
    any_lane,
    clamp,
    fma_lanes,
    hadamard_lanes,
    load,
    load_half,
    max_lanes,
    min_lanes,
    power_of_two_below,
    reduce_max,
    reduce_sum,
    round_product_lanes,
    round_to_half,
    select,
    splat,
    sqrt_lanes,
    store,
    store_half,
    sum_halves,
    to_float32,
    to_float64,
    transpose_runs,
)
from ggufmill.simd.table_lookup import lookup_lanes

RNG = np.random.default_rng(8)
A, B, C = (RNG.standard_normal(16).astype(np.float32) for _ in range(3))


@kernel
def _arithmetic(a, b, c, out):
    x, y, z = load(a, 0), load(b, 0), load(c, 0)
    store(out, 0, x + y * 3 - z / 7)
    store(out, 16, fma_lanes(x, y, z))
    store(out, 32, -abs(x) + 2)
    store(out, 48, sqrt_lanes(abs(y)))
    store(out, 64, min_lanes(x, max_lanes(y, z)))
    store(out, 80, clamp(x, -0.5, 0.5))
    store(out, 96, round_product_lanes(x, splat(10)))
    store(out, 112, to_float32(to_float64(x) * to_float64(y) + 1))
    store(out, 128, round_to_half(x * 1e6))
    x += 1
    x *= y
    store(out, 144, x)


def test_arithmetic():
    out = np.empty(160, np.float32)
    _arithmetic(A, B, C, out)
    one, wide = np.float32(1), np.float64
    want = [
        A + B * np.float32(3) - C / np.float32(7),
        (A.astype(wide) * B + C).astype(np.float32),
        -abs(A) + np.float32(2),
        np.sqrt(abs(B)),
        np.minimum(A, np.maximum(B, C)),
        np.clip(A, -0.5, 0.5),
        np.rint(A.astype(wide) * 10),
        (A.astype(wide) * B + 1).astype(np.float32),
        np.clip(A * np.float32(1e6), -65504, 65504),
        (A + one) * B,
    ]
    want[8] = want[8].astype(np.float16).astype(np.float32)
    assert np.array_equal(out.reshape(10, 16), np.array(want, np.float32))


@kernel
def _choose(a, b, out):
    x, y = load(a, 0), load(b, 0)
    store(out, 0, select((x > y) & ~(y < 0) | (x == 0), x, y))
    return any_lane(x > 100), any_lane(x >= y), reduce_max(x)


def test_masks():
    out = np.empty(16, np.float32)
    a = A.copy()
    a[3] = 0
    assert _choose(a, B, out) == (False, True, a.max())
    assert np.array_equal(out, np.where(((a > B) & ~(B < 0)) | (a == 0), a, B))


@kernel
def _tables(table, index, out):
    store(out, 0, lookup_lanes(table, load(index, 0)))


def test_look_up_reads_all_32_entries():
    table, out = RNG.standard_normal(32).astype(np.float32), np.empty(16, np.float32)
    for start in (0, 16):
        index = RNG.permutation(np.arange(start, start + 16)).astype(np.float32)
        _tables(table, index, out)
        assert np.array_equal(out, table[index.astype(int)])


@kernel
def _bytes_and_halves(a, codes, words, out):
    store(codes, 0, load(a, 0))
    store(out, 0, load(codes, 0))
    store_half(words, 0, load(a, 0))
    store(out, 16, load_half(words, 0))


def test_bytes_and_halves():
    a = RNG.integers(0, 256, 16).astype(np.float32)
    codes, words, out = np.empty(16, np.uint8), np.empty(16, np.uint16), np.empty(32, np.float32)
    _bytes_and_halves(a, codes, words, out)
    assert np.array_equal(codes, a.astype(np.uint8))
    assert np.array_equal(words, a.astype(np.float16).view(np.uint16))
    assert np.array_equal(out.reshape(2, 16), [a, a])
    _bytes_and_halves(a - 128, codes, words, out)
    assert np.array_equal(codes.view(np.int8), (a - 128).astype(np.int8))


@kernel
def _transposed(source, starts, out):
    for i in range(0, 32, 16):
        transpose_runs(source, starts, i + 1, out, 16 * i + 2)


def test_runs_are_transposed_to_lanes():
    source, starts = RNG.standard_normal(1000).astype(np.float32), RNG.integers(0, 960, 16)
    out = np.zeros(2 + 16 * 32 + 1, np.float32)
    _transposed(source, starts, out)
    np.testing.assert_array_equal(out[2:-1].reshape(32, 16), np.stack([source[s + 1 : s + 33] for s in starts], axis=1))
    assert out[0] == out[1] == out[-1] == 0


@kernel
def _mixed(a):
    return load(a, 0)


def test_only_rows_of_known_kinds_are_loaded():
    from numba.core.errors import TypingError

    with pytest.raises(TypingError):
        _mixed(np.zeros(16, np.int16))


@kernel
def _sums(a):
    return sum_halves(load(a, 0)), reduce_sum(load(a, 0))


def test_sums_go_by_halves():
    a = RNG.standard_normal(16).astype(np.float32)
    halves, total = _sums(a)
    folded = a.reshape(2, 8)
    while folded.shape[1] > 1:
        folded = folded[:, : folded.shape[1] // 2] + folded[:, folded.shape[1] // 2 :]
    assert np.array_equal(np.float32(halves), folded[:, 0])
    assert total == folded[0, 0] + folded[1, 0]


def _summed(count):
    """The operation that writes the sums of so many vectors, which lie one after the other, to lanes of another."""

    @intrinsic
    def summed(typingctx, source, out):
        def generate(context, builder, signature, args):
            vectors = [llvm.load(builder, args[0], llvm.F32X16, 64 * i) for i in range(count)]
            llvm.store(builder, llvm.lane_sums(builder, vectors), args[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @kernel
    def write(source, out):
        summed(source.ctypes.data, out.ctypes.data)

    return write


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_lanes_of_several_vectors_are_added_by_halves(count):
    vectors, out = RNG.standard_normal((count, 16)).astype(np.float32), np.empty(16, np.float32)
    _summed(count)(vectors, out)
    while vectors.shape[1] > 1:
        vectors = vectors[:, : vectors.shape[1] // 2] + vectors[:, vectors.shape[1] // 2 :]
    assert np.array_equal(out[:count], vectors[:, 0])


@kernel
def _hadamard(a, out):
    store(out, 0, hadamard_lanes(load(a, 0)))


def test_the_hadamard_transform_of_lanes():
    matrix, out = np.ones((1, 1)), np.empty(16, np.float32)
    while len(matrix) < 16:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    _hadamard(A, out)
    assert np.abs(out - matrix @ A).max() < 1e-5
    _hadamard(out.copy(), out)
    assert np.abs(out - 16 * A).max() < 1e-4


@kernel
def _powers_of_two(a, out):
    store(out, 0, power_of_two_below(load(a, 0)))


def test_the_power_of_two_below():
    a = np.abs(np.concatenate([[0, 1, 2, 1.9999999, 4, 1e-40], 1e5 * A[6:]])).astype(np.float32)
    out = np.empty(16, np.float32)
    _powers_of_two(a, out)
    assert np.array_equal(out, np.where(a < 1e-38, 0, np.ldexp(np.float32(1), np.frexp(a)[1] - 1)))
