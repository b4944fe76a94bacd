import dataclasses

import numpy as np
import pytest

from ggufmill.formats import FormatError, SourceTensor, TensorSource
from ggufmill.runtime.backends.cpu import weights
from ggufmill.runtime.backends.cpu.weights import WeightStore


def source_of(array, reads):
    """One tensor 'w' from an array in numpy order; every read is noted as (start, stop)."""
    flat = array.reshape(-1, array.shape[-1])

    def read(start, stop):
        assert start // array.shape[-2] == (stop - 1) // array.shape[-2]  # never across matrices
        reads.append((start, stop))
        return flat[start:stop]

    return TensorSource("test", {}, {"w": SourceTensor("w", array.shape[::-1], "f32", read)}, "test")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows for rows of 8 elements."""
    monkeypatch.setattr(weights, "TILE_BYTES", 16 * 8 * 4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cache_bytes", [0, 16 * 8 * 4 * 2, 1 << 20])
def test_products_are_right_whatever_is_kept(small_tiles, threads, cache_bytes):
    random, reads = np.random.default_rng(0), []
    array = random.standard_normal((3, 40, 8)).astype(np.float32)
    store = WeightStore(source_of(array, reads), cache_bytes, threads)
    loaded = store.matrix("w", 8, 40, 3)
    x = random.standard_normal((5, 8)).astype(np.float32)
    for matrix in (0, 2, 2, 1):
        assert np.allclose(loaded.multiply(x, matrix), x @ array[matrix].T, atol=1e-5)
    kept = sum(rows.nbytes for rows in store._rows.values())
    assert kept + store.free == cache_bytes
    if cache_bytes == 1 << 20:
        assert len(reads) == 9  # three tiles of each of three matrices, each read once
    elif cache_bytes == 0:
        assert len(reads) == 12
        assert kept == 0
    else:
        assert len(store._rows) == 2
        assert len(reads) == 12  # tiles of matrix 0 are kept, which is used only once
    assert all(stop - start <= 16 for start, stop in reads)


def test_lookup_reads_only_the_rows_it_needs(small_tiles):
    array, reads = np.arange(40 * 8, dtype=np.float32).reshape(40, 8), []
    loaded = WeightStore(source_of(array, reads), 1 << 20).matrix("w")
    assert np.array_equal(loaded.lookup(np.array([30, 2, 30])), array[[30, 2, 30]])
    assert sorted(reads) == [(2, 3), (30, 31)]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_heads_of_stacks_and_of_flat_tensors_are_the_same(cache_bytes):
    array = np.random.default_rng(1).standard_normal((4, 6, 8)).astype(np.float32)
    stacked = WeightStore(source_of(array, []), cache_bytes).matrix("w")
    flat = WeightStore(source_of(array.reshape(24, 8), []), cache_bytes).matrix("w")
    for _ in range(2):
        assert np.array_equal(stacked.heads(4), array)
        assert np.array_equal(flat.heads(4), array)


def test_large_products_are_shared_out(monkeypatch):
    monkeypatch.setattr(weights, "PARALLEL_THRESHOLD", 1)
    array = np.random.default_rng(2).standard_normal((7, 8)).astype(np.float32)
    x = np.ones((3, 8), np.float32)
    loaded = WeightStore(source_of(array, []), 1 << 20, threads=3).matrix("w")
    assert np.allclose(loaded.multiply(x), x @ array.T, atol=1e-5)


def test_a_vector_is_no_matrix():
    source = source_of(np.ones((1, 8), np.float32), [])
    vector = dataclasses.replace(source.tensors["w"], shape=(8,))
    store = WeightStore(dataclasses.replace(source, tensors={"w": vector}), 0)
    with pytest.raises(FormatError, match="is no matrix"):
        store.matrix("w")
