"""Every operation, compiled at every level that this machine can execute: one process per level, the same bits from all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufmill.simd.target import levels_here

SCRIPT = Path(__file__).with_name("level_checks.py")


def results_of(level, folder):
    out = folder / f"{level}.npz"
    environment = {**os.environ, "GGUFMILL_CPU": level}
    done = subprocess.run([sys.executable, str(SCRIPT), str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(out) as results:
        return dict(results)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    return results_of(levels_here()[-1], tmp_path_factory.mktemp("best"))


@pytest.mark.process
@pytest.mark.parametrize("level", levels_here()[:-1])
def test_all_levels_give_the_same_bits(level, best, tmp_path):
    results = results_of(level, tmp_path)
    assert (results.pop("level"), best["level"]) == (level, levels_here()[-1])
    for name, values in results.items():
        assert np.array_equal(values, best[name]), name
        assert values.any()


def test_products_are_those_of_numpy(best):
    random = np.random.default_rng(0)  # as level_checks.py draws them
    for size in (16, 16, 64):
        random.standard_normal(size)
    for size in (16, 64):
        random.integers(0, size, 16)
    random.standard_normal(16)
    unsigned, signed = random.integers(0, 256, 64), random.integers(-127, 128, 64)
    wide, small = 1 + (unsigned * signed).reshape(16, 4).sum(axis=1), 1 + (unsigned // 2 * signed).reshape(16, 4).sum(axis=1)
    assert np.array_equal(best["dots"][:32], np.concatenate([wide, small]))
    pairs = (unsigned // 2 * signed).reshape(32, 2).sum(axis=1)
    assert np.array_equal(best["dots"][32:48].view(np.int16), pairs)
    assert np.array_equal(best["dots"][48:64], 1 + (pairs**2).reshape(16, 2).sum(axis=1))
    table = np.array([(37 * i + 11) % 256 for i in range(50)], np.uint8)
    assert np.array_equal(best["dots"][64:].view(np.uint8), table[unsigned // 8])
