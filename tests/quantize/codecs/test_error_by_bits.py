"""More bits, less error: within a family, each type has a lower error than the next smaller one."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

FAMILIES = [
    ["q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0"],
    ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_0"],
    ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"],
    ["iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "q8_0"],
    ["iq2_ks", "iq2_kl", "iq3_ks", "iq4_kss", "iq4_ks", "iq5_ks"],
    ["iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"],
]


@pytest.mark.parametrize("types", FAMILIES, ids=lambda types: types[0])
@pytest.mark.parametrize("with_importance", [True, False])
def test_errors_fall_with_more_bits(types, with_importance):
    rng = np.random.default_rng(7)
    x = (rng.standard_t(4, size=(8, 1024)) * 0.02).astype(np.float32)
    importance = (rng.chisquare(2, size=1024) + 0.01).astype(np.float32) if with_importance else None
    w = 1.0 if importance is None else importance.astype(np.float64)
    errors = [float((w * (decode(encode(x, t, importance), t, 1024) - x) ** 2).sum()) for t in types]
    bits = [TYPES[t].row_bytes(1024) for t in types]
    assert bits == sorted(bits)
    assert errors == sorted(errors, reverse=True), dict(zip(types, errors, strict=True))
