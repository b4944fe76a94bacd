"""Every processor encodes the same bytes under a covariance, and so do the workers of a cluster."""

import numpy as np
import pytest
from covariances import random_rows
from digests import assert_same_everywhere

from ggufmill.quantize import encode
from ggufmill.quantize.covariance.coupling import couple
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.prepared import prepare
from ggufmill.quantize.covariance.refine import refine


def covariance(n: int, rank: int, seed: int = 0) -> Covariance:
    """Of small integers, whose products are exact in any order: inputs that mix `rank` sources, columns of different scales."""
    random = np.random.default_rng(seed)
    x = random.integers(-2, 3, (64, rank)) @ random.integers(-2, 3, (rank, n)) + random.integers(-1, 2, (64, n))
    x *= 2 ** random.integers(0, 3, n)
    return Covariance((x.T @ x / 64).astype(np.float32), 5000)


def weights(rows: int, n: int) -> np.ndarray:
    """float32 [rows, n] up to 0.06, small ones most often."""
    random = np.random.default_rng(0)
    return (random.integers(-999, 1000, (3, rows, n)).sum(axis=0) / 50_000).astype(np.float32)


@pytest.mark.slow(keep=["q4_K"])
@pytest.mark.parametrize("name", ["q4_K", "iq2_k", "iq4_kss", "iq3_s", "iq2_kt"])  # numbers, parity, vectors of four, of eight
def test_with_both_covariances(name):
    coupled = couple(covariance(72, 12, 3))
    found = encode(weights(72, 256), name, covariance=covariance(256, 30), effort=2, coupled=coupled)
    assert_same_everywhere(f"both covariances {name}", found)


@pytest.mark.slow(keep=["iq4_nl"])
@pytest.mark.parametrize("name", ["iq4_nl", "iq3_xxs", "iq4_kt"])
def test_refinement(name):
    x, q, h = weights(5, 512), random_rows(name, 5, 512), prepare(covariance(512, 40))
    refined = refine(x, q, name, h, 1)
    assert (refined != q).any()
    assert_same_everywhere(f"refinement {name}", refined, h.damped.triangle)
