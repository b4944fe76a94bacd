"""Scales of blocks as arrays over the rows' bytes."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.formats.layouts import decode
from ggufmill.formats.layouts.block_scales import block_scales

TUNABLE = [name for name in TYPES if block_scales(name)]


def test_which_types_have_them():
    plain = {
        name for name, kind in TYPES.items() if kind.rows == 1 and kind.base is None and not kind.is_float and kind.block > 1
    }
    without = {"iq1_m", "mxfp4", "nvfp4"}  # bits that lie apart, powers of two
    assert set(TUNABLE) - {"q8_KV"} >= {name for name in plain - without if kind_is_encoded(name)}
    assert not {*without, "f32", "bf16", "iq2_k_r4"} & set(TUNABLE)


def kind_is_encoded(name):
    return name in (
        "q4_0",
        "q4_1",
        "q2_K",
        "q4_K",
        "iq2_k",
        "iq4_kss",
        "iq2_xxs",
        "iq3_s",
        "iq2_kt",
        "iq4_kt",
        "q6_0",
        "iq2_bn",
    )


@pytest.mark.parametrize("name", TUNABLE)
def test_weights_are_proportional_to_them(name):
    """Three times the scales are three times the weights: nothing else is among them, and nothing is left out."""
    generator, n, kind = np.random.default_rng(0), 512, TYPES[name]
    q = generator.integers(0, 256, (3, kind.row_bytes(n)), dtype=np.uint8)
    for scale in block_scales(name):
        numbers = scale.of(q, n)
        numbers[...] = generator.uniform(0.5, 1, numbers.shape)
    weights = decode(q, name, n)
    for scale in block_scales(name):
        scale.of(q, n)[...] *= 4
    np.testing.assert_allclose(decode(q, name, n), 4 * weights, rtol=1e-6)
    scale = block_scales(name)[0]
    scale.of(q, n)[1] = 0
    assert (decode(q, name, n) == 4 * weights).all(axis=1).tolist() == [True, False, True]
