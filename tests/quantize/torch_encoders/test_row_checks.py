"""What a GPU finds out about encoded rows, computed by the processor."""

import numpy as np
import pytest
from covariances import random_rows as random_codes

pytest.importorskip("torch")

from ggufmill.formats import TYPES
from ggufmill.formats.layouts import layout_of
from ggufmill.formats.layouts.decoding import decode
from ggufmill.quantize.codecs.fields import BlockFields
from ggufmill.quantize.plain_rows import GPU_TYPES, plain_rows
from ggufmill.quantize.torch_encoders.row_checks import block_sums, check_rows, field_tables

pytestmark = pytest.mark.oracle
N, ROWS = 512, 6


def random_rows(name: str) -> np.ndarray:
    q, fields = random_codes(name, ROWS, N), BlockFields.of(name)
    fields.write_scale(q, np.full_like(fields.read_scale(q), 2e-4))
    for field in ("dmin", "offset"):
        if getattr(fields.layout, field) is not None:
            bits = np.linspace(-1e-3, 2e-3, ROWS * N // fields.layout.block).astype(np.float16).view(np.uint16)
            fields.write(q, field, bits.astype(np.uint32).reshape(ROWS, -1))
    return q


@pytest.mark.parametrize("name", sorted(GPU_TYPES))
def test_sums_of_blocks(name):
    q, block = random_rows(name), layout_of(name).block
    y = decode(q, name, N).astype(np.float64)
    x = (y + np.random.default_rng(1).standard_normal(y.shape) * y.std()).astype(np.float32)
    sums = np.empty((x.size // block, 3), np.float32)
    blocks = x.reshape(-1, block), q.reshape(-1, TYPES[name].block_bytes)
    block_sums(*blocks, np.empty((0, 0), np.float32), field_tables(name), 0, np.float32(0), sums)
    found = x.astype(np.float64)
    for column, terms in enumerate((np.abs(found), y * (y - 2 * found), found**2)):
        terms = terms.reshape(-1, block)
        expected = terms.max(1) if column == 0 else terms.sum(1)
        assert np.allclose(sums[:, column], expected, rtol=1e-4, atol=1e-5 * np.abs(terms).sum(1).max())


def rows_near(q: np.ndarray, name: str) -> np.ndarray:
    """What q decodes to, and a little more: no block is of zeros."""
    return decode(q, name, N) + np.float32(1e-4)


def doubtful(x: np.ndarray, q: np.ndarray, importance: np.ndarray | None, name: str) -> list[int]:
    return np.flatnonzero(check_rows(x, q, importance, plain_rows(TYPES[name]))).tolist()


@pytest.mark.parametrize("name", ["q4_K", "iq4_k", "iq2_xxs_r4"])
def test_rows_that_need_a_look(name):
    plain = TYPES.plain(TYPES[name]).name
    q = random_rows(plain)
    x = rows_near(q, plain)
    assert doubtful(x, q, np.ones(N, np.float32), name) == []
    for number, weight in ((1, np.nan), (2, np.inf), (3, 1e6), (5, -1e30)):
        x[number, 77] = weight
    x[4] = 0
    assert doubtful(x, q, np.ones(N, np.float32), name) == [1, 2, 3, 4, 5]
    x = rows_near(q, plain)
    x[2] = -x[2]  # farther from zeros
    x[3] *= 1e-9
    assert doubtful(x, q, None, name) == [2, 3]


def test_blocks_without_importance_or_weights_to_speak_of():
    q = random_rows("iq4_k")
    x, importance = rows_near(q, "iq4_k"), np.ones(N, np.float32)
    x[1, 32:48] = 1e-10
    assert doubtful(x, q, importance, "iq4_k") == [1]
    assert doubtful(x, q, None, "iq4_k") == []
    importance[64:80] = 1e-10
    assert doubtful(x, q, importance, "iq4_k") == list(range(ROWS))
