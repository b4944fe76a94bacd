"""The products that a GEMM is made of, of bytes and of floats, and its inputs in blocks and panels."""

import numpy as np
import pytest
from cpu_products import block_rows, panels_of, round_rows
from digests import assert_same_everywhere
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_samples import sample_of

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm
from ggufmill.runtime.backends.cpu.kernels.gemm.amx_products import multiply_tiles
from ggufmill.runtime.backends.cpu.kernels.gemm.byte_products import multiply_bytes, word_bytes, write_sums
from ggufmill.runtime.backends.cpu.kernels.gemm.byte_tiles import CODE_BIAS, CODE_COLUMNS, COLUMN_TILE, TILE_TOKENS, pair_sums
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import BLOCK_TOKENS, add_products, has_bf16_dots
from ggufmill.simd.instructions import amx
from ggufmill.simd.memory import aligned_empty
from ggufmill.simd.target import target
from ggufmill.simd.workers import Workers


def to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def buffers(tokens=512):
    return aligned_empty((8, tokens, 32), np.float32), aligned_empty((2 * 512 * 16,), np.uint16)


# --- bytes ----------------------------------------------------------------------------------------------------------


def by_column_tiles(numbers, columns):
    """Numbers [tokens or panels, those of all columns, ...] as multiply_bytes takes them, a tile of columns after the other."""
    per_tile, tiles = COLUMN_TILE * numbers.shape[1] // columns, -(-columns // COLUMN_TILE)
    padded = np.zeros((len(numbers), tiles * per_tile, *numbers.shape[2:]), numbers.dtype)
    padded[:, : numbers.shape[1]] = numbers
    return np.ascontiguousarray(padded.reshape(len(numbers), tiles, per_tile, -1).swapaxes(0, 1))


def bytes_case(n, rows, columns, group, has_terms, seed, most=255, span=None):
    """Integer weights, activations and scales of 1, so that float32 results are the exact integers: (ours, numpy's).
    span: columns that share a scale of the activations; None: as many as of the weights, or 32."""
    span = span or max(32, group)
    random = np.random.default_rng(seed)
    filled, panels = -(-n // TILE_TOKENS) * TILE_TOKENS, -(-rows // 32) * 2
    codes = random.integers(max(0, most - 90), most + 1, (panels * 16, columns)).astype(np.uint8)
    tokens = random.integers(-127, 128, (filled, columns)).astype(np.int8)
    scales = random.integers(-2, 3, (panels, columns // group, 16)).astype(np.float32)
    terms = random.integers(-9, 10, scales.shape).astype(np.float32) if has_terms else None
    sums = tokens.reshape(filled, -1, min(span, group)).sum(axis=2, dtype=np.int32)
    out = np.full((n, rows + 5), np.nan, np.float32)
    words = aligned_empty((word_bytes(filled),), np.uint8)
    numbers = (
        tokens,
        np.ones((filled, columns // span), np.float32),
        (CODE_BIAS - 128) * sums,
        sums.astype(np.float32),
    )
    inputs = [by_column_tiles(one, columns) for one in numbers]
    panel_codes = (codes - np.uint8(CODE_BIAS)).reshape(panels, 16, -1, CODE_COLUMNS).transpose(0, 2, 1, 3)
    for pair in range(0, panels, 2):
        added = aligned_empty((filled, 32), np.float32)
        weights = [by_column_tiles(one[pair : pair + 2], columns) for one in (panel_codes, scales, terms) if one is not None]
        for tile in range(-(-columns // COLUMN_TILE)):
            start = tile * COLUMN_TILE
            at = [one[tile].ctypes.data for one in weights]
            multiply_bytes(
                (True,) * (group // 16),
                (True,) * (span // 16),
                pair_sums(most),
                at[0],
                128,
                at[1],
                None if terms is None else at[2],
                tuple(one.ctypes.data for one in inputs),
                filled,
                0,
                0,
                n,
                start,
                min(COLUMN_TILE, columns - start),
                start + COLUMN_TILE >= columns,
                False,
                added,
                words.ctypes.data,
                out,
                5 + 16 * pair,
                (0, 0, 0, 0),
            )
    products = np.einsum(
        "rgc,tgc->trg", codes.reshape(len(codes), -1, group).astype(int) - 128, tokens.reshape(filled, -1, group)
    )

    def per_row(numbers):
        return numbers.astype(int).transpose(0, 2, 1).reshape(len(codes), -1)

    expected = (products * per_row(scales)).sum(axis=2)
    if terms is not None:
        expected = expected + sums.astype(int) @ per_row(terms).T
    assert np.isnan(out[:, :5]).all()
    return out[:, 5:], expected[:n, :rows]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 150),
    st.integers(1, 3),
    st.sampled_from([16, 32, 256]),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([15, 31, 63, 129, 255]),
)
def test_products_of_bytes_are_exact(n, rows, blocks, group, has_terms, seed, most):
    ours, expected = bytes_case(n, rows, max(32, group) * blocks, group, has_terms, seed, most)
    assert np.abs(ours - expected).max() <= (1e-6 * np.abs(expected).max() if group == 256 else 0)


@pytest.mark.parametrize("n", [1, 2, 7, 60])
def test_groups_of_256_columns_with_activations_of_a_scale_per_32(n):
    ours, expected = bytes_case(n, 40, 768, 256, False, 1, 255, 32)
    assert np.abs(ours - expected).max() <= 1e-6 * np.abs(expected).max()


def test_products_of_bytes_are_exact_over_several_stretches_of_columns():
    ours, expected = bytes_case(7, 33, 1056, 16, True, 0)
    assert np.abs(ours - expected).max() <= 1e-6 * np.abs(expected).max()  # beyond 2^24 float32 sums are rounded


# --- all processors -------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=["q4_k_r4*", "rows-True"])
@pytest.mark.parametrize(
    ("name", "exact"),
    [("iq5_k", False), ("q4_k_r4", False), *((name, exact) for name in ("f16", "bf16_r16", "rows") for exact in (False, True))],
)
def test_all_processors_get_the_same_bits(name, exact, monkeypatch):
    """The whole path, however it is shared out: of bytes, and of float32 with fused multiply-add; others nearly so."""
    monkeypatch.setattr(amx, "permitted", lambda: False)
    (n, rows, columns), random = (7, 48, 512), np.random.default_rng(0)
    x, w = (random.integers(-999, 1000, shape).astype(np.float32) for shape in ((n, columns), (rows, columns)))
    weights = w if name == "rows" else encode(w, name, np.ones(columns, np.float32))
    results = []
    for threads, cuts in ((1, []), (3, []), (1, [1, 4])):
        workers, out = Workers(threads), np.zeros((n, rows), np.float32)
        for some, part in zip(np.split(x, cuts), np.split(out, cuts), strict=True):
            tokens = gemm.Activations(some)
            if name == "rows":
                gemm.multiply_rows(weights, exact, tokens, part, 0, workers.ready(), threads)
                continue
            plan, program = gemm.plan_gemm(weights, TYPES[name], columns, 1, exact), gemm.ProductList(threads)
            assert plan is not None
            program.product(1, plan, program.blocks_of(0, plan.form, tokens), part, gemm.one_job(len(some)))
            program.run(workers.ready())
        results.append(out)
    assert all(np.array_equal(result, results[0]) for result in results[1:])
    stored = w if name == "rows" else decode(weights, name, columns)
    scale = np.abs(x).astype(np.float64) @ np.abs(stored).astype(np.float64).T
    assert (np.abs(results[0] - x.astype(np.float64) @ stored.astype(np.float64).T) / scale).max() < (1e-6 if exact else 8e-3)
    as_bf16 = name in {"bf16_r16", "rows"} and not exact and has_bf16_dots()
    if name in {"iq5_k", "q4_k_r4"} or (target().has_fma and not as_bf16):
        assert_same_everywhere(f"product of {name} by panels", results[0])


# --- floats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [16, BLOCK_TOKENS])
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (16, 32), (33, 70)])
def test_rounding_to_bf16(shape, unit):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x.flat[0] = np.float32(1 + 2**-8)  # a tie: to even
    n, columns = shape
    words = x.view(np.uint32)
    expected = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    blocks = round_rows(x, 2, unit)
    rows = blocks.transpose(1, 0, 3, 2, 4).reshape(2, blocks.shape[0] * unit, -1)
    assert np.array_equal(rows[0, :n, :columns], expected)
    assert not rows[:, n:].any()
    assert not rows[:, :, columns:].any()
    both = to_float(rows[0, :n, :columns]).astype(np.float64) + to_float(rows[1, :n, :columns])
    assert np.all(np.abs(both - x) <= 2.0**-17 * np.abs(x))
    assert np.array_equal(round_rows(x, 1, unit)[:, 0], blocks[:, 0])


def test_rounding_keeps_what_is_not_finite():
    x = np.array([[np.nan, np.nan, np.inf, -np.inf]], np.float32)
    # Adding to the one would make it a number; the other has nothing in the half that stays.
    x.view(np.uint32)[0, :2] = 0xFFFFFFFF, 0x7F800001
    found = to_float(round_rows(x).reshape(-1)[:4])
    assert np.isnan(found[:2]).all()
    assert found[2:].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (13, 32)])
def test_blocks_of_float32(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    blocks = block_rows(x, BLOCK_TOKENS)
    rows = blocks[:, 0].transpose(0, 2, 1, 3).reshape(blocks.shape[0] * BLOCK_TOKENS, -1)
    assert np.array_equal(rows[: shape[0], : shape[1]], x)
    assert not rows[shape[0] :].any()
    assert not rows[:, shape[1] :].any()


def rows_of_panels(panels, rows):
    """Panels as float32 rows [rows, columns]."""
    if panels.dtype == np.float32:
        return panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])[:rows]
    return to_float(panels.transpose(0, 2, 1, 3).reshape(-1, 2 * panels.shape[1])[:rows])


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (21, 70), (64, 98)])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "bf16_r16"])
@pytest.mark.parametrize("bf16", [False, True])
def test_panels_of_rows(rows, columns, name, bf16):
    if rows % TYPES[name].rows or (bf16 and name == "bf16_r16"):
        pytest.skip("there is no such matrix, or no such panel")
    weights, q = sample_of(name, rows, columns, 1)
    if name == "f16":  # subnormal numbers, infinities
        q.view(np.float16)[0, :4] = 6e-8, -3e-6, np.inf, -np.inf
        weights = decode(q, name, columns)
    found = rows_of_panels(panels_of(q, name, columns, bf16), rows)
    if bf16 and name != "bf16":
        with np.errstate(invalid="ignore"):  # inf - inf
            near = np.abs(found[:, :columns] - weights) <= 2.0**-8 * np.abs(weights)
        assert np.all(near | (found[:, :columns] == weights))
    else:
        assert np.array_equal(found[:, :columns], weights)
    assert not found[:, columns:].any()


@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 1, 32), (5, 40, 96), (33, 70, 1056), (70, 300, 64)])
@pytest.mark.parametrize("way", ["tiles", "dots", "float32"])
def test_products_of_floats(way, n, rows, columns):
    if (way == "tiles" and not amx.permitted()) or (way == "dots" and not target().has_bf16_dots):
        pytest.skip(f"this processor has no bf16 {way}")
    random = np.random.default_rng(2)
    x, w = random.standard_normal((n, columns)).astype(np.float32), random.standard_normal((rows, columns)).astype(np.float32)
    panels = panels_of(w.view(np.uint8), "f32", columns, way != "float32")
    tokens = block_rows(x, BLOCK_TOKENS) if way == "float32" else round_rows(x, 1, BLOCK_TOKENS if way == "dots" else 16)
    weights, unit, words = rows_of_panels(panels, rows).astype(np.float64), tokens.shape[3], columns // panels.shape[1]
    rounded = (tokens if way == "float32" else to_float(tokens))[:, 0].transpose(0, 2, 1, 3)
    rounded = rounded.reshape(-1, columns)[:n].astype(np.float64)
    out = np.full((n, rows + 20), np.nan, np.float32)
    if way == "tiles":
        multiply_tiles(panels, tokens, *buffers(32), out, 16, rows + 16)
    else:
        sums = aligned_empty((-(-len(panels) // 2), len(tokens) * unit, 32), np.float32)
        run = 512 if way == "float32" else 1024
        for first in range(0, columns, run):  # panels of a run of columns at a time
            some = np.ascontiguousarray(panels[:, first // words : (first + run) // words])
            steps = some.shape[1] * words // 32
            bf16 = None if way == "float32" else True
            add_products(bf16, some.ctypes.data, some[0].nbytes, len(some), tokens, n, first // 32, steps, sums)
        write_sums(sums, out, 0, n, 16, rows + 16, 0)
    bound = np.abs(rounded) @ np.abs(weights.T)
    assert np.all(np.abs(out[:, 16:-4] - rounded @ weights.T) <= 1e-6 * bound)
    assert np.isnan(out[:, :16]).all()
    assert np.isnan(out[:, -4:]).all()
