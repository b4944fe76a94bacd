"""Tables of rotary embeddings: of a token by itself as of many, wherever it is."""

import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.pass_program import Rotations
from ggufmill.runtime.graph.values import RotaryEmbedding


@pytest.mark.parametrize("offset", [0, -31])
def test_a_token_by_itself_has_the_numbers_of_many(offset):
    frequencies = 10000.0 ** -(np.arange(13) / 13)
    rope = RotaryEmbedding(frequencies, 1.25, offset=offset)
    positions = np.array([0, 1, 62, 63, 64, 127, 128, 5, 100_003, 5, 6])
    many, one = Rotations(rope, len(positions)), Rotations(rope, 1)
    many.fill(positions)
    for position, row in zip(positions, many.table, strict=True):
        one.fill(np.array([position]))
        assert one.table.tobytes() == row.tobytes()
    assert np.allclose(many.table, 1.25 * np.exp(1j * np.outer(positions + offset, frequencies)), atol=1e-6)
