"""More bits, less error: within a family a type is never worse than the next lower one."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

LADDERS = [
    ["q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0"],
    ["q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_0"],
    ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"],
    ["iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "q8_0"],
    ["iq2_ks", "iq2_kl", "iq3_ks", "iq4_kss", "iq4_ks", "iq5_ks"],
    ["iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"],
]


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder[0])
@pytest.mark.parametrize("with_importance", [True, False])
def test_errors_fall(ladder, with_importance):
    rng = np.random.default_rng(7)
    x = (rng.standard_t(4, size=(8, 1024)) * 0.02).astype(np.float32)
    weights = (rng.chisquare(2, size=1024) + 0.01).astype(np.float32) if with_importance else None
    v = 1.0 if weights is None else weights.astype(np.float64)
    errors = [float((v * (decode(encode(x, t, weights), t, 1024) - x) ** 2).sum()) for t in ladder]
    bits = [TYPES[t].row_bytes(1024) for t in ladder]
    assert bits == sorted(bits)
    assert errors == sorted(errors, reverse=True), dict(zip(ladder, errors, strict=True))
