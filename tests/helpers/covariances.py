"""Covariances, weights and encoded rows for tests, and the errors of rows under a covariance."""

from __future__ import annotations

from functools import cache

import numpy as np

from ggufmill.quantize import decode
from ggufmill.quantize.codecs.fields import BlockFields
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance

_SCALES = {"iq2_kl": 2e-5, "iq1_kt": 2e-6, "iq2_kt": 2e-6, "iq3_kt": 2e-5, "iq4_kt": 2e-5}  # d that suits weights of 0.02


@cache
def covariance(n: int, rank: int, seed: int = 0, tokens: int = 4096, dead: int = 0) -> Covariance:
    """Of inputs that mix `rank` sources and a little noise, with scales that differ between columns; the first `dead` are 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((512, rank)) @ rng.standard_normal((rank, n)) + 0.1 * rng.standard_normal((512, n))
    x *= np.exp(rng.standard_normal(n))
    x[:, :dead] = 0
    h = (x.T @ x / len(x)).astype(np.float32)
    return Covariance((h + h.T) / np.float32(2), tokens)


def weights(rows: int, n: int, seed: int = 0) -> np.ndarray:
    """float32 [rows, n], normal with a standard deviation of 0.02."""
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32) * 0.02


def row_errors(x: np.ndarray, q: np.ndarray, type_name: str, h: Covariance) -> np.ndarray:
    r = x.astype(np.float64) - decode(q, type_name, x.shape[1])
    return np.einsum("ij,jk,ik->i", r, h.damped().astype(np.float64), r)


def random_rows(type_name: str, rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Random codes, with a d that is near what the encoder would choose for `weights`."""
    fields = BlockFields.of(type_name)
    q = np.random.default_rng(seed).integers(0, 256, (rows, fields.type.row_bytes(n)), np.uint8)
    with np.errstate(invalid="ignore"):
        shape = fields.read_scale(q).shape
    fields.write_scale(q, np.full(shape, _SCALES.get(type_name, 1e-3), np.float32))
    return q
