"""Floats as integers and bytes, by every instruction that makes them."""

import numpy as np
import pytest

from ggufmill.simd.instructions.integers import bytes_of_rows, bytes_of_words, rounded
from ggufmill.simd.target import target, target_at

RANDOM = np.random.default_rng(2)
levels = pytest.mark.parametrize("level", target().levels)


@levels
def test_ties_are_rounded_to_even(level, run_piece):
    y = np.array([-127, -126.5, -125.5, -1.5, -0.5, -0.2, 0, 0.5, 0.7, 1.5, 2.5, 3, 100.4, 126.5, 127, -3e6], np.float32)
    out = run_piece(lambda b, value: rounded(b, value, target_at(level)), np.zeros(16, np.int32), y)
    assert np.array_equal(out, np.rint(y))


@levels
def test_bytes_of_four_vectors_follow_one_another(level, run_piece):
    words = RANDOM.permutation(np.arange(-128, 128, dtype=np.int32))[:64].reshape(4, 16)
    out = run_piece(lambda b, *values: bytes_of_words(b, values, target_at(level)), np.zeros(64, np.int8), *words)
    assert np.array_equal(out, words.reshape(-1))


@levels
def test_eight_rows_give_four_bytes_in_turn(level, run_piece):
    rows = RANDOM.permutation(np.arange(-128, 128, dtype=np.int32))[:128].reshape(8, 16)
    out = run_piece(lambda b, *values: bytes_of_rows(b, values, target_at(level)), np.zeros(128, np.int8), *rows)
    assert np.array_equal(out.reshape(4, 8, 4), rows.reshape(8, 4, 4).transpose(1, 0, 2))
