"""Activations rounded to bf16 by sums and products."""

import numpy as np
import pytest

from ggufmill.runtime import load_model
from ggufmill.runtime.backends.reference.elementwise import add, scale
from ggufmill.runtime.graph.rounding import _SPLITTER


def test_the_sums_round_to_eight_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    draw = np.random.default_rng(1)
    x = (draw.standard_normal(4000) * 10.0 ** draw.integers(-20, 20, 4000)).astype(np.float32)
    scaled = scale(None, x, _SPLITTER)
    result = add(None, scaled, add(None, scaled, x, -1.0), -1.0)
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (result == exact).mean() > 0.999  # ties may go the other way
    assert np.abs(result - x).max() <= np.abs(x).max() * 2.0**-8
    assert np.array_equal(result.astype(ml_dtypes.bfloat16).astype(np.float32), result)


def test_predictions_change_by_the_noise_of_bf16(tiny):
    tokens = np.random.default_rng(0).integers(0, 258, 40)
    plain, noisy = load_model(tiny), load_model(tiny, round_activations=True)
    assert len(noisy.graph.layers) == len(plain.graph.layers)
    a, b = plain.logits(tokens), noisy.logits(tokens)
    relative = np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))
    assert 1e-4 < relative < 0.02
    hidden = noisy.hidden_of_windows(tokens[None])[0]
    assert not np.any(hidden.view(np.uint32) & 0xFFFF)  # the last norm's output is what bf16 holds
