"""Rows of caches in blocks, as tasks write them: the bytes of the codec."""

import numpy as np

from ggufmill.runtime.backends.cpu.kernels.cache_blocks import store_q8_0
from ggufmill.runtime.backends.cpu.kv_cache import encode_with_nan
from ggufmill.runtime.backends.cpu.memory import Block, Partition, View
from ggufmill.simd import team

TOKENS, HEADS, WIDTH, ROW_BYTES, LIMIT = 5, 3, 96, 102, 7


def test_bytes_are_those_of_the_codec():
    x = np.random.default_rng(0).standard_t(2, (TOKENS, HEADS, WIDTH)).astype(np.float32)
    x[0, 1], x[1, 0, 32:64], x[2, 2, 5], x[3, 1, 95], x[4, 0] = 0, 1e-41, np.nan, -np.inf, x[4, 0] * np.float32(1e30)
    cache = np.zeros((HEADS, LIMIT, ROW_BYTES), np.uint8)
    addresses = np.array([[cache.ctypes.data + (1 + t) * ROW_BYTES, cache.strides[0]] for t in range(TOKENS)])
    rows = View(Block(x.nbytes, x.view(np.uint8).reshape(-1)), 0, TOKENS, x.strides[0], HEADS, x.strides[1], WIDTH)
    partition = Partition("tokens", TOKENS, 2, rows.size, rows.size)
    record = np.frombuffer(store_q8_0.pack(partition.words(), {"x": rows, "addresses": addresses}), np.int64)
    team.run(0, np.array([[0, store_q8_0.address, record.ctypes.data, partition.parts]]))
    expected = encode_with_nan(x.reshape(-1, WIDTH), "q8_0").reshape(TOKENS, HEADS, ROW_BYTES)
    assert np.array_equal(cache[:, 1 : 1 + TOKENS], expected.transpose(1, 0, 2))
    assert (cache[2, 3] == 0xFF).all()
    assert not cache[:, [0, 6]].any()
