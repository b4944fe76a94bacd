"""Rows of caches in blocks, as tasks write them: the bytes of the codec."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.runtime.backends.cpu.kernels.cache_blocks import STORES
from ggufmill.runtime.backends.cpu.kv_cache import encode_with_nan
from ggufmill.runtime.backends.cpu.memory import Block, Partition, View
from ggufmill.simd import team

TOKENS, HEADS, WIDTH, LIMIT = 5, 3, 96, 7


@pytest.mark.parametrize("type_name", list(STORES))
def test_bytes_are_those_of_the_codec(type_name):
    store, row_bytes = STORES[type_name], TYPES[type_name].row_bytes(WIDTH)
    x = np.random.default_rng(0).standard_t(2, (TOKENS, HEADS, WIDTH)).astype(np.float32)
    x[0, 1], x[1, 0, 32:64], x[2, 2, 5], x[3, 1, 95], x[4, 0] = 0, 1e-41, np.nan, -np.inf, x[4, 0] * np.float32(1e30)
    cache = np.zeros((HEADS, LIMIT, row_bytes), np.uint8)
    addresses = np.array([[cache.ctypes.data + (1 + t) * row_bytes, cache.strides[0]] for t in range(TOKENS)])
    rows = View(Block(x.nbytes, x.view(np.uint8).reshape(-1)), 0, TOKENS, x.strides[0], HEADS, x.strides[1], WIDTH)
    partition = Partition("tokens", TOKENS, 2, rows.size, rows.size)
    record = np.frombuffer(store.pack(partition.words, {"x": rows, "addresses": addresses}), np.int64)
    team.run(0, np.array([[0, store.address, record.ctypes.data, partition.parts]]))
    expected = encode_with_nan(x.reshape(-1, WIDTH), type_name).reshape(TOKENS, HEADS, row_bytes)
    assert np.array_equal(cache[:, 1 : 1 + TOKENS], expected.transpose(1, 0, 2))
    assert (cache[2, 3] == 0xFF).all()
    assert not cache[:, [0, 6]].any()
