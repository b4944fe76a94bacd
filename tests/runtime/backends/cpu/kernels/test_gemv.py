"""Products on packed weights against decoded ones, on random bits: every code, scale and flag occurs."""

import numpy as np
import pytest
from cpu_products import ActivationCodes, multiply, products, quantise
from digests import assert_same_everywhere
from guarded_memory import guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.formats.layouts import decode, layout_of
from ggufmill.formats.layouts.reader.code_layout import code_layout
from ggufmill.runtime.backends.cpu.kernels.gemv import gemv as module
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import gemv
from ggufmill.runtime.backends.cpu.kernels.gemv.integer_steps import has_integer_scales
from ggufmill.runtime.backends.cpu.kernels.gemv.rows import steps
from ggufmill.runtime.backends.cpu.kernels.gemv_plan import GemvPlan
from ggufmill.simd import team
from ggufmill.simd.instructions.dot_products import multiplies_signed
from ggufmill.simd.target import foreign_target, target

# One type for each kind of step and of look-up.
OF_EACH_KIND = [
    *("q4_K", "q5_0", "q8_0_r8", "iq4_ks", "iq4_k", "iq6_k", "iq4_k_r4"),
    *("iq3_xxs", "iq3_s", "iq2_k", "iq3_k", "iq2_xs_r4", "iq3_s_r4", "q3_K", "iq4_kss", "iq2_kl"),
]
MOST_TOKENS = 8  # of a pass
SHAPED = ["q4_0", "q8_0_r8", "iq4_k", "q4_k_r4", "bf16", "bf16_r16", "iq2_bn", "q1_0_g128"]


def random_rows(name: str, rows: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Packed rows of random bits, but for the floats, which are ordinary numbers."""
    kind, layout = TYPES[name], layout_of(name)

    def set_floats(bits: np.ndarray, addresses: np.ndarray, number: str) -> None:
        """bits: uint8 [groups, blocks, bits]; addresses: [rows, n, width] of floats."""
        shape = (*bits.shape[:2], *addresses.shape[:2])
        if number == "e8m0":
            words = rng.choice([0, 1, 2, 120, 127, 130], shape)
        else:
            dtype = {"bf16": "<f4"}.get(number, f"<f{addresses.shape[2] // 8}")
            words = rng.standard_normal(shape).astype(dtype).view(dtype.replace("f", "u")).astype(np.int64)
            words >>= 16 if number == "bf16" else 0
        bits[:, :, addresses] = words[..., None] >> np.arange(addresses.shape[2]) & 1

    packed = rng.integers(0, 256, (rows // kind.rows, kind.rows * kind.row_bytes(n)), np.uint8)
    if layout.row_scale is not None:
        size = int(layout.row_scale[1:]) // 8
        scales = rng.standard_normal((len(packed), kind.rows)).astype(f"<f{size}")[..., None].view(np.uint8)
        packed[:, : kind.rows * kind.row_meta].reshape(len(packed), kind.rows, -1)[:, :, :size] = scales
    blocks = packed[:, kind.rows * kind.row_meta :].reshape(len(packed), n // layout.block, -1)
    bits = np.unpackbits(blocks, axis=2, bitorder="little")
    floats = [(layout.d, layout.d_format), (layout.dmin, "f16"), (layout.offset, "f16")]
    if layout.number is not None:
        floats.append((layout.codes, layout.number))
    for addresses, number in floats:
        if addresses is not None:
            set_floats(bits, addresses, number)
    blocks[:] = np.packbits(bits, axis=2, bitorder="little")
    return packed.reshape(rows, -1)


def weights_of(packed: np.ndarray, name: str, n: int) -> np.ndarray:
    """The weights that products multiply with: of iq6_k, which decodes with a cubic, its rounded values, as the reference."""
    return decode(packed, name, n, integer_values=True).astype(np.float64)


def activations_for(name: str, x: np.ndarray):
    """What the product takes, and the same numbers as float64."""
    block = gemv(name).activations
    if block == 0:
        return x, x.astype(np.float64)
    found = quantise(x, block)
    return found, (found.codes.reshape(len(x), -1, block) * found.scales[:, :, None].astype(np.float64)).reshape(x.shape)


def first_tokens(activations: ActivationCodes | np.ndarray, count: int) -> ActivationCodes | np.ndarray:
    """What the product takes of the first tokens, at the end of memory that can be read."""
    if isinstance(activations, ActivationCodes):
        return ActivationCodes(*(guarded(each[:count]) for each in activations[:3]), activations.block)
    return guarded(activations[:count])


def check(name: str, rows: int, n: int, tokens: int, seed: int) -> None:
    """Products with so many tokens, and with fewer."""
    rng = np.random.default_rng(seed)
    packed = random_rows(name, rows, n, rng)
    packed[: TYPES[name].rows] *= rng.integers(0, 2, dtype=np.uint8)  # now and then a group of rows whose bits are all 0
    packed = guarded(packed)
    given_activations, exact = activations_for(name, rng.standard_normal((tokens, n)).astype(np.float32))
    w = weights_of(packed, name, n)
    result = multiply(packed, name, given_activations)
    assert result.shape == (tokens, rows)
    bound = 2e-6 * (np.abs(exact) @ np.abs(w).T) + 1e-30
    assert (np.abs(result - exact @ w.T) <= bound).all()
    for count in range(1, min(tokens, MOST_TOKENS + 1)):  # a pass of each number of tokens
        some = multiply(packed, name, first_tokens(given_activations, count))
        assert np.array_equal(some, result[:count])


def columns_of(name: str) -> int:
    return max(gemv(name).columns, 4)


@pytest.mark.slow(keep=[*OF_EACH_KIND, *SHAPED, "iq1_m", "iq1_kt", "iq2_kt", "tq1_0", "mxfp4"])
@pytest.mark.parametrize("name", products())
def test_product_equals_that_of_decoded_rows(name):
    unit = columns_of(name)
    check(name, 2 * TYPES[name].rows, unit * (3 if unit >= 128 else 13), 13, 1)


# Types of which AVX2 has numbers of points, or signs, written ahead.
AHEAD = {
    *("iq2_xxs", "iq2_xs", "iq1_s", "iq3_s", "iq2_s", "iq1_m"),
    *("iq2_xxs_r4", "iq2_xs_r4", "iq1_s_r4", "iq3_s_r4", "iq2_s_r4", "iq1_m_r4"),
}


def test_types_of_what_is_written_ahead():
    of = foreign_target("avx2")
    assert {name for name in products() if gemv(name).activations and steps(name, of)[0].reader.bytes_ahead(of)} == AHEAD


@pytest.mark.parametrize("name", sorted(AHEAD))
def test_numbers_of_points_and_signs_are_written_ahead_for_some_steps(name):
    """Twice for sixteen steps of a row, and for those that are left."""
    check(name, 3 * TYPES[name].rows, 37 * columns_of(name), 9, 9)


@pytest.mark.parametrize("name", ["iq2_xxs", "iq3_xxs"])  # of more vectors of one scale than fit
def test_sums_of_pairs_do_not_overflow(name):
    """Rows of one byte, whichever it is, among them the largest weights, with the largest activations of their signs."""
    n = columns_of(name)
    packed = random_rows(name, 256, n, np.random.default_rng(0))
    packed.reshape(256, -1, TYPES[name].block_bytes)[:, :, 2:] = np.arange(256)[:, None, None]
    weights = weights_of(packed, name, n)
    for row, w in zip(packed, weights, strict=True):
        found = quantise(np.where(w < 0, -127, 127).astype(np.float32)[None], gemv(name).activations)
        assert multiply(row[None], name, found).item() == pytest.approx(127 * np.abs(w).sum(), rel=1e-4)


@pytest.mark.parametrize("name", SHAPED)
@settings(max_examples=12, deadline=None)
@given(groups=st.integers(1, 7), units=st.integers(1, 11), tokens=st.integers(1, 8), seed=st.integers(0, 99))
def test_any_shape(name, groups, units, tokens, seed):
    check(name, groups * TYPES[name].rows, units * columns_of(name), tokens, seed)


@pytest.mark.parametrize("name", ["q4_0", "iq4_k", "q4_k_r4"])
def test_rows_of_several_blocks(name):
    """Two passes, or four, of seven tokens at most take some rows, then the next ones."""
    n = 4096
    rows = 3 * module._BLOCK_BYTES // TYPES[name].row_bytes(n) // 8 * 8 + 8
    assert rows * TYPES[name].row_bytes(n) > 2 * module._BLOCK_BYTES
    check(name, rows, n, 13, 6)


@pytest.mark.parametrize("name", ["f32", "bf16_r16", "q8_0", "q8_0_r8", "q4_K", "q4_k_r4", "iq4_k"])
@pytest.mark.parametrize("rest", [0, 3])
def test_streams_of_a_large_matrix_give_the_bits_of_its_groups_of_rows(name, rest):
    """A matrix of several streams, with and without groups that are left over, guarded at its end."""
    stored, n = TYPES[name], 1024
    group_bytes = stored.rows * stored.row_bytes(n)
    groups = module._MOST_STREAMS * -(-module._LEAST_STREAM_BYTES // group_bytes) + rest
    rng = np.random.default_rng(8)
    packed = guarded(random_rows(name, groups * stored.rows, n, rng))
    x, exact = activations_for(name, rng.standard_normal((1, n)).astype(np.float32))
    found, w = multiply(packed, name, x)[0], weights_of(packed, name, n)
    assert (np.abs(found - w @ exact[0]) <= 2e-6 * (np.abs(w) @ np.abs(exact[0])) + 1e-30).all()
    alone = [multiply(each, name, x)[0] for each in packed.reshape(groups, stored.rows, -1)]
    assert np.array_equal(found, np.concatenate(alone))
    assert np.array_equal(found, multiply(packed, name, x, one_stream=True)[0])


def test_rows_that_memory_bounds_are_read_in_streams():
    wide = foreign_target("avx512")
    found = {name: module.streams_of(name, wide) for name in ("f32", "q8_0", "q8_0_r8", "q4_k_r4", "q4_K", "iq2_k", "iq3_kt")}
    assert found == {"f32": 4, "q8_0": 4, "q8_0_r8": 4, "q4_k_r4": 2, "q4_K": 2, "iq2_k": 1, "iq3_kt": 1}
    assert module.streams_of("q8_0", foreign_target("avx2")) == 1


@pytest.mark.parametrize(
    ("level", "most"),
    [
        ("portable", [4, 4, 4]),
        ("x86-64-v2", [4, 4, 4]),
        ("avx2", [8, 4, 4]),
        ("avx512-bf16", [8, 4, 4]),
        ("neon-dotprod", [4, 4, 1]),
    ],
)
def test_tokens_of_a_pass(level, most):
    of = foreign_target(level)
    assert [module.tokens_per_pass(name, of) for name in ("q4_K", "q4_k_r4", "bf16")] == most


@pytest.mark.parametrize("name", ["q4_K", "q8_0", "q4_0_r8", "bf16"])
def test_several_tokens_one_by_one(name):
    """Where a table names no part for them."""
    rng, n = np.random.default_rng(10), columns_of(name) * 4
    packed = random_rows(name, 16, n, rng)
    x = activations_for(name, rng.standard_normal((5, n)).astype(np.float32))[0]
    assert np.array_equal(multiply(packed, name, x, several=False), multiply(packed, name, x))


@pytest.mark.parametrize("name", ["q4_K", "iq2_k_r4", "q5_0", "iq2_xxs", "f16", "bf16_r16"])
def test_a_token_gets_the_same_bits_alone_and_among_others(name):
    rng, n = np.random.default_rng(2), columns_of(name) * 8
    packed = random_rows(name, 32, n, rng)
    x = rng.standard_normal((8, n)).astype(np.float32)
    together = multiply(packed, name, activations_for(name, x)[0])
    for t in range(8):
        for tokens in (1, t + 1):
            some = multiply(packed, name, activations_for(name, x[t + 1 - tokens : t + 1])[0])
            assert np.array_equal(some[-1], together[t])


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_all_processors_get_the_same_bits(name):
    """Those that multiply signed bytes subtract nothing from values beyond 128, and get other last bits of such types, and so
    do those that alone add products of a type as integers."""
    rng, n = np.random.default_rng(3), columns_of(name) * 9
    packed = random_rows(name, 16, n, rng)
    x = rng.integers(-999, 1000, (5, n)).astype(np.float32)
    x[1] = np.where(np.arange(n) % 2, 3, -3)  # codes of 127 and -127 alone: the largest sums there can be
    result = multiply(packed, name, activations_for(name, x)[0])
    layout = code_layout(name)
    beyond_128 = layout.grid is None and layout.trellis is None and max(layout.table) - min(layout.table) > 128
    signed = beyond_128 and multiplies_signed(target())
    integers = has_integer_scales(name, target()) and not has_integer_scales(name, foreign_target("neon"))
    assert_same_everywhere(f"product of {name}" + ", signed" * signed + ", integers" * integers, result)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_largest_codes_do_not_overflow(name):
    """All bits set, all activations at their largest: sums stay within what each level can hold (tests/levels.py)."""
    n = columns_of(name) * 8
    packed = random_rows(name, 4, n, np.random.default_rng(0))
    blocks = packed.reshape(4, -1, TYPES[name].block_bytes)
    scales = blocks[:, :, :2].copy()
    blocks[:2], blocks[2:] = 255, 128
    blocks[:, :, :2] = scales
    for sign in (1, -1):
        exact = np.full((1, n), sign * 127.0)
        found = quantise(exact.astype(np.float32), gemv(name).activations)
        assert (found.codes == sign * 127).all()
        np.testing.assert_allclose(multiply(packed, name, found), exact @ weights_of(packed, name, n).T, rtol=1e-4)


@pytest.mark.parametrize("name", ["q4_K", "q4_0_r8", "iq4_ks"])
def test_special_activations(name):
    rng, n = np.random.default_rng(4), columns_of(name) * 8
    packed = random_rows(name, 8, n, rng)
    x = np.zeros((4, n), np.float32)
    x[1, 5], x[2, 7], x[3, 0] = 1e30, np.nan, 1e-35
    result = multiply(packed, name, activations_for(name, x)[0])
    assert (result[[0, 3]] == 0).all()
    assert np.isfinite(result[1]).all()
    assert np.isnan(result[2]).all()
    w = weights_of(packed, name, n)
    np.testing.assert_allclose(result[1], 1e30 * w[:, 5], rtol=1e-4, atol=1e30 * np.abs(w).max() * 1e-5)


@pytest.mark.parametrize("name", ["iq4_k", "q8_0_r8", "bf16"])
def test_experts_in_slices(name):
    """Jobs name a matrix, some tokens and where results go; parts may be called in any order, and more of them than rows."""
    rng, n, rows, matrices = np.random.default_rng(5), columns_of(name) * 8, 24, 3
    packed = random_rows(name, matrices * rows, n, rng)
    x = rng.standard_normal((6, n)).astype(np.float32)
    found, _ = activations_for(name, x)
    arrays = found[:3] if isinstance(found, ActivationCodes) else (found,)
    addresses = ([a.ctypes.data for a in arrays] + [0, 0])[:3]
    jobs = np.array([[2, 0, 1, 3], [0, 1, 5, 4], [1, 0, 2, 0]], np.int64)
    for slices, equal in ((1, 1), (3, 3), (50, 50), (5, 1), (6, 2), (20, 2), (12, 4)):  # of one size, or ever smaller ones
        out = np.full((9, rows + 8), -1, np.float32)
        size = packed.shape[1]
        plan = GemvPlan(gemv(name), packed.ctypes.data, rows * size, size, rows, n, slices, equal)
        table = np.array(plan.table(addresses, out.ctypes.data, rows + 8, jobs.ctypes.data, several=True), np.int64)
        program = np.array([[0, gemv(name).address, table.ctypes.data, len(jobs) * slices]], np.int64)
        team.run(0, program)
        for matrix, first, tokens, start in jobs:
            own = activations_for(name, x[first : first + tokens])[0]
            expected = multiply(packed[matrix * rows : (matrix + 1) * rows], name, own)
            assert np.array_equal(out[start : start + tokens, :rows], expected)
        assert (out[:, rows:] == -1).all()
        assert (out[2] == -1).all()


def test_types_without_a_product():
    assert gemv("i32") is None
    assert gemv("q8_k_r16") is None
    with pytest.raises(ValueError, match="q8_1 has no"):
        multiply(np.zeros((1, 36), np.uint8), "q8_1", np.zeros((1, 32), np.float32))
