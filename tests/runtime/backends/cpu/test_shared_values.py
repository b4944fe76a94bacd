"""Values that all heads share, weighed beside their own, against numpy."""

import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.attention import AttentionParams
from ggufmill.runtime.backends.cpu.flash import Segment, attend
from ggufmill.runtime.backends.cpu.kernels.attention.shared_values import SharedValues
from ggufmill.runtime.backends.cpu.kv_cache import CacheRows
from ggufmill.simd.workers import Workers

# queries, tokens before them, heads, widths of keys, values and shared values
SHAPES = [(1, 0, 2, 16, 16, 20), (7, 200, 3, 32, 16, 64), (150, 3, 2, 48, 32, 100), (300, 130, 1, 16, 64, 33)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_shared_values_are_weighed_as_others(shape, exact):
    n, past, heads, k_width, v_width, width = shape
    draw, m = np.random.default_rng(4), past + n
    q, k, v = (draw.standard_normal(s, np.float32) for s in ((n, heads, k_width), (heads, m, k_width), (heads, m, v_width)))
    values, params = draw.standard_normal((m, width), np.float32) + 1, AttentionParams(0.3)
    scores = np.einsum("nhk,hmk->hnm", q, k).astype(np.float64) * 0.3
    scores[:, np.arange(m) > past + np.arange(n)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hnm,mr->nhr", weights / weights.sum(-1, keepdims=True), values)

    def run(shared, found, threads):
        out = np.empty((n, heads, v_width), np.float32)
        attend([Segment(q, CacheRows.of(k), CacheRows.of(v), past, out, shared, found)], heads, params, Workers(threads))
        return out

    alone, shared = run(None, None, 1), SharedValues(values, exact)
    whole = np.zeros((n, heads + 2, width), np.float32)  # heads of a larger array
    close = 1e-5 if exact else 1e-2
    assert np.abs(run(shared, whole[:, 1:-1], 1) - alone).max() < 1e-5
    assert np.abs(whole[:, 1:-1] - expected).max() < close
    assert not whole[:, 0].any()
    assert not whole[:, -1].any()
    one, two = np.empty((heads, width)), np.empty((heads, width))
    run(shared, one, 1)
    run(shared, two, 2)
    assert np.array_equal(one, two)
    np.testing.assert_allclose(one, (expected**2).sum(0), rtol=close)
