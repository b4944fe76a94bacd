"""Matrix products from packed weights of every type: errors, and sums that depend neither on threads nor on batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_samples import sample_of, store_of

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import can_encode, decode, encode
from ggufmill.runtime.backends.cpu import weights as weights_module
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm
from ggufmill.runtime.backends.cpu.kernels.gemm.byte_tiles import CODE_BIAS
from ggufmill.runtime.backends.cpu.kernels.gemm.gemm_kernels import FLOAT32
from ggufmill.runtime.backends.cpu.kernels.gemm.unpack_panels import panel_form, unpack
from ggufmill.runtime.backends.cpu.weights import WeightStore
from ggufmill.simd.instructions import amx
from ggufmill.simd.workers import Workers

WORKERS = {threads: Workers(threads) for threads in (1, 2, 3, 7)}
KNOWN = [name for name, kind in TYPES.items() if can_encode(kind)]
# The others have the kernels of one of these, each with code of its own that is compiled for its rows.
OF_EACH_KIND = ["q4_0", "q8_0", "q2_K", "q6_K", "iq4_nl", "iq2_xxs", "iq3_s", "iq5_k", "q4_k_r4", "bf16_r16", "f16", "iq2_kt"]


@pytest.mark.slow(keep=OF_EACH_KIND)
@pytest.mark.parametrize("name", KNOWN)
def test_products_with_every_type(name, monkeypatch):
    """Many tokens through Linear, on every path that this processor has; the smooth table of iq6_k is rounded, as the
    reference does it, which costs 0.4% more."""
    n, columns = 11, 256
    rows = 48 if TYPES[name].rows > 1 else 43
    weights, q = sample_of(name, rows, columns)
    x = np.random.default_rng(3).standard_normal((n, columns)).astype(np.float32)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    if panel_form(name) is not None:
        panels = unpack(q, name, columns)
        codes = (panels.codes + np.uint8(CODE_BIAS)).transpose(0, 2, 1, 3).reshape(-1, columns)[:rows]
        codes = codes.astype(np.float64) - panels.zero

        def wide(numbers):
            return np.repeat(numbers.transpose(0, 2, 1).reshape(-1, columns // panels.group), panels.group, axis=1)[:rows]

        unpacked = codes * wide(panels.scales) + (wide(panels.terms) if panels.terms is not None else 0)
        tolerance = 5e-3 if name == "iq6_k" else 1e-6
        assert np.abs(unpacked - weights).max() <= tolerance * np.abs(weights).max()
    permitted = amx.permitted()
    for tiles in {permitted, False}:
        monkeypatch.setattr(amx, "permitted", lambda tiles=tiles: tiles)
        ours = store_of(name, q, rows, columns).matrix("w").multiply(x)
        error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
        assert error < (2e-5 if TYPES[name].is_float or name == "bf16_r16" else 1e-2)
    exact = store_of(name, q, rows, columns, exact=True).matrix("w").multiply(x)
    assert np.abs(exact - expected).max() <= 2e-5 * np.abs(expected).max()


def multiplied(weights, x, cuts=(), matrix=0):
    """The product of x, cut into batches, always as a GEMM."""
    return np.concatenate([weights.multiply(part, matrix, use_gemv=False) for part in np.split(x, cuts)])


@pytest.mark.slow(keep=[f"{name}-*" for name in OF_EACH_KIND])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_threads_batches_and_other_matrices_change_no_bit(name, exact, monkeypatch):
    rows, columns, n = 80, 768, 29
    weights, q = sample_of(name, 2 * rows, columns)
    x = np.random.default_rng(4).standard_normal((n, columns)).astype(np.float32)
    monkeypatch.setattr(weights_module, "PARALLEL_THRESHOLD", 1)
    permitted = amx.permitted()
    for tiles in {permitted, False}:
        monkeypatch.setattr(amx, "permitted", lambda tiles=tiles: tiles)
        alone = store_of(name, q, rows, columns, exact=exact).matrix("w")
        expected = multiplied(alone, x)
        double = x.astype(np.float64) @ weights[:rows].T.astype(np.float64)
        assert np.sqrt(np.mean((expected - double) ** 2)) <= (1e-6 if exact else 1e-2) * np.sqrt(np.mean(double**2))
        for threads in (2, 3, 7):
            shared = store_of(name, q, rows, columns, exact=exact, threads=threads).matrix("w")
            assert np.array_equal(multiplied(shared, x), expected)
        for cuts in ((1,), (5, 6, 14), tuple(range(1, n)), (n - 1,)):
            assert np.array_equal(multiplied(alone, x, cuts), expected)
        assert np.array_equal(multiplied(alone, x[::-1].copy())[::-1], expected)
        assert not np.array_equal(multiplied(alone, x, (), 1), expected)
        other = store_of(name, q[rows:], rows, columns, exact=exact).matrix("w")
        assert np.array_equal(multiplied(alone, x, (), 1), multiplied(other, x))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["f32", "f16", "bf16", "bf16_r16", "rows"]),
    st.sampled_from(["exact", "rounded", "neither"]),
    st.integers(1, 40),
    st.sampled_from([1, 2, 5, 7, 33]),
    st.one_of(st.integers(1, 700), st.integers(1000, 1100)),
    st.sampled_from([1, 2, 3, 7]),
    st.data(),
)
def test_products_of_any_shape_cut_anywhere(name, way, n, sixteens, columns, threads, data):
    rows = 16 * sixteens - (0 if name == "bf16_r16" else data.draw(st.integers(0, 15)))
    columns = columns + columns % 2 if name == "bf16_r16" else columns
    cut = data.draw(st.integers(0, n))
    stored, exact, rounds = "f32" if name == "rows" else name, way == "exact", way == "rounded"
    weights, q = sample_of(stored, rows, columns, n)
    x = np.random.default_rng(5).standard_normal((n, columns)).astype(np.float32)

    def product(x):
        out = np.full((len(x), rows + 7), np.nan, np.float32)
        if not len(x):
            return out
        if name == "rows":
            gemm.multiply_rows(weights, exact, gemm.Activations(x), out, 4, WORKERS[threads].ready(), threads)
        else:
            plan, program, tokens = (
                gemm.plan_gemm(q, TYPES[name], columns, 1, exact, rounds),
                gemm.ProductList(threads),
                gemm.Activations(x),
            )
            assert plan is not None
            program.product(1, plan, program.blocks_of(0, plan.form, tokens), out, gemm.one_job(len(x)), 4)
            program.run(WORKERS[threads].ready())
        return out

    out = product(x)
    assert np.isnan(out[:, :4]).all()
    assert np.isnan(out[:, -3:]).all()
    assert np.array_equal(np.concatenate([product(x[:cut]), product(x[cut:])]), out, equal_nan=True)
    double, bound = x.astype(np.float64) @ weights.T.astype(np.float64), np.abs(x) @ np.abs(weights.T)
    assert np.all(
        np.abs(out[:, 4:-3] - double)
        <= (1e-6 if exact or name == "f32" or (name, way) == ("f16", "neither") else 2**-7) * bound
    )


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 32, 32), (13, 64, 96), (150, 96, 1024)])
def test_products_with_some_matrices_of_a_plan(threads, n, rows, columns):
    """The numbers of each matrix by itself, written beside others."""
    kind, draw, workers = TYPES["q8_0"], np.random.default_rng(6), WORKERS[threads]
    packed = encode(draw.standard_normal((5 * rows, columns)).astype(np.float32), "q8_0")
    x, plan = draw.standard_normal((n, columns)).astype(np.float32), gemm.plan_gemm(packed, kind, columns, 5)
    assert plan is not None
    inputs, program = gemm.filled(x, plan.form, workers.ready(), threads), gemm.ProductList(threads)
    out = np.full((3, n, rows + 16), np.nan, np.float32)
    program.matmul_packed(0, inputs, plan, 1, out[..., :rows])
    program.run(workers.ready())
    assert np.isnan(out[..., rows:]).all()
    for number, found in enumerate(out[..., :rows], 1):
        own = packed[number * rows : (number + 1) * rows]
        alone = store_of("q8_0", own, rows, columns).matrix("w", columns, rows).multiply(x, use_gemv=False)
        assert np.array_equal(found, alone)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 600), st.integers(1, 70), st.sampled_from([1, 2, 3, 7]), st.data())
def test_products_of_arrays(heads, n, inner, outer, threads, data):
    random, workers = np.random.default_rng(inner), WORKERS[threads]
    x = random.standard_normal((heads, n, inner) if data.draw(st.booleans()) else (n, inner)).astype(np.float32)
    shape, view = data.draw(
        st.sampled_from(
            [
                ((heads, inner, outer), lambda m: m),
                ((heads, outer, inner), lambda m: m.transpose(0, 2, 1)),
                ((heads, inner, 2 * outer), lambda m: m[..., :outer]),
                ((heads, 2 * inner, 2 * outer), lambda m: m[:, ::2, ::2]),
            ]
        )
    )
    matrices = view(random.standard_normal(shape).astype(np.float32))
    kind = data.draw(st.sampled_from(["new", "wider", "transposed"]))
    place = np.full((heads, n, outer + 9), np.nan, np.float32)
    transposed = np.empty((n, heads, outer), np.float32).transpose(1, 0, 2)
    out = {"new": None, "wider": place[..., :outer], "transposed": transposed}[kind]
    form = data.draw(st.sampled_from([gemm.FLOAT32_FORM, gemm.decoded_form(False)]))  # the second: bf16 where there is any
    result = gemm.matmul(x, matrices, out, workers.ready(), workers.count, form)
    assert out is None or result is out
    assert np.isnan(place[..., outer:]).all()
    double = x.astype(np.float64) @ matrices.astype(np.float64)
    assert np.all(np.abs(result - double) <= (1e-6 if form.kind == FLOAT32 else 2**-7) * (np.abs(x) @ np.abs(matrices)))
    cut = data.draw(st.integers(0, n))
    parts = [gemm.matmul(part, np.ascontiguousarray(matrices), form=form) for part in (x[..., :cut, :], x[..., cut:, :])]
    assert np.array_equal(np.concatenate(parts, axis=1), result)


def test_a_token_that_is_not_finite_spoils_its_own_result_only(monkeypatch):
    weights, q = sample_of("q4_K", 32, 256)
    x = np.ones((12, 256), np.float32)
    x[3, 17] = np.nan
    permitted = amx.permitted()
    for tiles in {permitted, False}:
        monkeypatch.setattr(amx, "permitted", lambda tiles=tiles: tiles)
        out = store_of("q4_K", q, 32, 256).matrix("w").multiply(x)
        assert np.isnan(out[3]).all()
        assert np.isfinite(np.delete(out, 3, axis=0)).all()
    assert np.isfinite(weights).all()


def test_stored_bytes_that_lie_nowhere_are_kept_within_the_limit():
    _, q = sample_of("q8_0", 64, 256)
    made = []

    def produce(start, stop):
        made.append((start, stop))
        return q[start:stop]

    tensor = SourceTensor("w", (256, 32, 2), "q8_0", lambda a, b: decode(q[a:b], "q8_0", 256), produce, TYPES["q8_0"])
    source = TensorSource("test", {}, {"w": tensor}, "test")
    x = np.ones((20, 256), np.float32)
    for room, times in ((q.nbytes, 2), (q.nbytes - 1, 0)):
        made.clear()
        store_ = WeightStore(source, room)
        linear = store_.matrix("w")
        for matrix in (0, 1, 0):
            linear.multiply(x, matrix)
        assert len(made) == times
        assert store_.free >= 0


def test_lookup_reads_rows_where_they_lie(monkeypatch):
    monkeypatch.setattr(weights_module, "TILE_BYTES", 1)
    weights, q = sample_of("q6_K", 40, 256)
    ids = np.array([30, 2, 30, 39])
    assert np.array_equal(store_of("q6_K", q, 40, 256).matrix("w").lookup(ids), weights[ids])
