import struct

import gguf
import numpy as np
import pytest

from ggufmill.formats import FormatError, MillError, SourceTensor, TensorSource
from ggufmill.imatrix import Imatrix, load


@pytest.fixture
def imatrix():
    rng = np.random.default_rng(3)
    return Imatrix(
        {
            "blk.0.attn_q.weight": (rng.random((1, 8), np.float32) * 100, np.array([1024])),
            "blk.0.ffn_up_exps.weight": (rng.random((4, 8), np.float32) * 100, np.array([10, 20, 30, 40])),
        },
        ["calibration.txt"],
        2,
        512,
    )


def test_gguf_round_trip_is_exact(imatrix, tmp_path):
    imatrix.save(tmp_path / "a.imatrix")
    loaded = load(tmp_path / "a.imatrix")
    assert loaded.entries.keys() == imatrix.entries.keys()
    for name, (sums, counts) in imatrix.entries.items():
        assert np.array_equal(loaded.entries[name][0], sums)
        assert np.array_equal(loaded.entries[name][1], counts)
    assert (loaded.datasets, loaded.chunk_count, loaded.chunk_size) == (["calibration.txt"], 2, 512)


def test_the_gguf_package_reads_our_files(imatrix, tmp_path):
    imatrix.save(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.0.ffn_up_exps.weight.in_sum2"].shape.tolist() == [8, 4]
    assert tensors["blk.0.ffn_up_exps.weight.counts"].shape.tolist() == [1, 4]
    assert tensors["blk.0.ffn_up_exps.weight.counts"].data.reshape(-1).tolist() == [10, 20, 30, 40]


def test_dat_stores_the_means(imatrix, tmp_path):
    imatrix.save(tmp_path / "a.dat")
    loaded = load(tmp_path / "a.dat")
    means = imatrix.means()
    assert loaded.chunk_count == 2
    assert loaded.datasets == ["calibration.txt"]
    for name, mean in loaded.means().items():
        np.testing.assert_allclose(mean.reshape(means[name].shape), means[name], rtol=1e-6)


def test_dat_bytes(tmp_path):
    """Built from the format's description: two calls, values = mean * calls."""
    values = np.array([2.0, 4.0], "<f4")
    data = struct.pack("<ii", 1, 1) + b"w" + struct.pack("<ii", 2, 2) + values.tobytes() + struct.pack("<ii", 2, 1) + b"t"
    (tmp_path / "a.dat").write_bytes(data)
    imatrix = load(tmp_path / "a.dat")
    assert imatrix.means()["w"].tolist() == [[1.0, 2.0]]
    imatrix.save(tmp_path / "b.dat")
    assert (tmp_path / "b.dat").read_bytes() == data


def test_old_dat_without_dataset(tmp_path):
    data = struct.pack("<ii", 1, 1) + b"w" + struct.pack("<ii", 0, 1) + np.array([3.0], "<f4").tobytes()
    (tmp_path / "a.dat").write_bytes(data)
    assert load(tmp_path / "a.dat").means()["w"].tolist() == [[3.0]]


def test_an_unseen_expert_gets_the_mean_of_the_others(imatrix):
    sums, counts = imatrix.entries["blk.0.ffn_up_exps.weight"]
    counts *= 10
    sums[2], counts[2] = 0, 0
    assert imatrix.unseen_experts() == {"blk.0.ffn_up_exps.weight": [2]}
    means = imatrix.means()["blk.0.ffn_up_exps.weight"]
    np.testing.assert_allclose(means[2], sums[[0, 1, 3]].sum(0) / counts.sum(), rtol=1e-6)
    counts[:] = 0
    assert "blk.0.ffn_up_exps.weight" not in imatrix.means()


def test_merge(imatrix):
    merged = imatrix.merge(imatrix)
    for name, (sums, counts) in imatrix.entries.items():
        assert np.array_equal(merged.entries[name][0], 2 * sums)
        assert np.array_equal(merged.entries[name][1], 2 * counts)
    assert merged.chunk_count == 4
    assert merged.datasets == ["calibration.txt"]
    other = Imatrix({"blk.0.attn_q.weight": (np.ones((1, 4), np.float32), np.array([1]))})
    with pytest.raises(MillError, match="not one model"):
        imatrix.merge(other)


def test_merging_a_legacy_file_weights_by_tokens(tmp_path):
    """100 windows of 512 tokens with a mean of 10, and 1,024 tokens with a mean of 1."""
    long = Imatrix({"w": (np.full((4, 2), 512000.0, np.float32), np.full(4, 51200))}, ["long"], 100)
    short = Imatrix({"w": (np.full((4, 2), 1024.0, np.float32), np.full(4, 1024))}, ["short"], 2)
    long.save(tmp_path / "long.dat")
    short.save(tmp_path / "short.gguf")
    for merged in (
        load(tmp_path / "long.dat").merge(load(tmp_path / "short.gguf")),
        load(tmp_path / "short.gguf").merge(load(tmp_path / "long.dat")),
    ):
        assert merged.entries["w"][0].shape == (4, 2)
        np.testing.assert_allclose(merged.means()["w"], (512000 + 1024) / (51200 + 1024), rtol=1e-5)


def test_entries_of_latent_attention_fit_other_layouts(tmp_path):
    """attn_k_b is one matrix in one layout and one per head in the other."""
    by_head = Imatrix({"blk.0.attn_k_b.weight": (np.arange(8, dtype=np.float32).reshape(4, 2), np.full(4, 3))})
    pooled = by_head.fit(source(**{"blk.0.attn_k_b.weight": (2, 40)}), "a")
    assert pooled.entries["blk.0.attn_k_b.weight"][0].tolist() == [[12, 16]]
    assert pooled.entries["blk.0.attn_k_b.weight"][1].tolist() == [12]
    repeated = pooled.fit(source(**{"blk.0.attn_k_b.weight": (2, 10, 4)}), "a")
    assert np.array_equal(repeated.means()["blk.0.attn_k_b.weight"], np.repeat([[1.0, np.float32(16 / 12)]], 4, 0))


def test_pooled_heads_are_not_split_by_mistake():
    """A row of 8 columns for 4 heads could be taken for four rows of 2."""
    name, rng = "blk.0.attn_k_b.weight", np.random.default_rng(0)
    by_head = Imatrix({name: (rng.random((4, 8), np.float32), np.full(4, 3))})
    pooled = by_head.fit(source(**{name: (8, 40)}), "a")
    repeated = pooled.fit(source(**{name: (8, 10, 4)}), "a")
    np.testing.assert_allclose(repeated.means()[name], np.repeat(by_head.entries[name][0].sum(0)[None] / 12, 4, 0), rtol=1e-6)
    one_row = Imatrix({name: (by_head.entries[name][0].reshape(1, -1), np.array([3]))})
    for merged in (by_head.merge(pooled), pooled.merge(by_head), pooled.merge(one_row)):
        np.testing.assert_allclose(merged.entries[name][0], 2 * pooled.entries[name][0], rtol=1e-6)
        assert merged.entries[name][1].tolist() == [24]


def source(**shapes):
    tensors = {n: SourceTensor(n, shape, "f32", lambda a, b: np.zeros((b - a, 1))) for n, shape in shapes.items()}
    return TensorSource("model.gguf", {}, tensors, "")


def test_fit(imatrix, tmp_path):
    shapes = {"blk.0.attn_q.weight": (8, 16), "blk.0.ffn_up_exps.weight": (8, 16, 4)}
    imatrix.save(tmp_path / "a.dat")
    fitted = load(tmp_path / "a.dat").fit(source(**shapes), "a.dat")
    assert fitted.entries["blk.0.ffn_up_exps.weight"][0].shape == (4, 8)
    np.testing.assert_allclose(
        fitted.means()["blk.0.ffn_up_exps.weight"], imatrix.means()["blk.0.ffn_up_exps.weight"], rtol=1e-6
    )
    with pytest.raises(MillError, match=r"none of its 2 entries .* names a tensor of model\.gguf"):
        imatrix.fit(source(x=(8, 8)), "a.dat")
    with pytest.raises(MillError, match="1 x 8, the tensor needs 1 x 4"):
        imatrix.fit(source(**{"blk.0.attn_q.weight": (4, 16)}), "a.dat")
    imatrix.entries["blk.0.attn_q.weight"][0][0, 0] = np.nan
    with pytest.raises(MillError, match="NaN"):
        imatrix.fit(source(**shapes), "a.dat")


@pytest.mark.parametrize("suffix", ["dat", "gguf"])
def test_truncated(imatrix, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    imatrix.save(path)
    complete = path.read_bytes()
    for length in (0, 3, 7, 30, len(complete) // 2, len(complete) - 17):
        path.write_bytes(complete[:length])
        with pytest.raises(FormatError):
            load(path)


@pytest.mark.parametrize("data", [b"hello, this is no imatrix at all", struct.pack("<i", 0), struct.pack("<iii", 1, -5, 7)])
def test_not_an_imatrix(tmp_path, data):
    (tmp_path / "a.dat").write_bytes(data)
    with pytest.raises(FormatError, match="a.dat"):
        load(tmp_path / "a.dat")


def test_heads_in_one_row_are_pooled_or_split(tmp_path):
    """ik_llama.cpp writes attn_k_b with all heads in one row, under the name of a view."""
    name, values = b"blk.0.attn_k_b.weight (reshaped)", np.array([1, 2, 3, 4, 5, 6], "<f4")
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, 6) + values.tobytes()
    (tmp_path / "a.dat").write_bytes(data)
    imatrix = load(tmp_path / "a.dat")
    assert imatrix.fit(source(**{"blk.0.attn_k_b.weight": (2, 30)}), "a").means()["blk.0.attn_k_b.weight"].tolist() == [[3, 4]]
    per_head = imatrix.fit(source(**{"blk.0.attn_k_b.weight": (2, 10, 3)}), "a").means()["blk.0.attn_k_b.weight"]
    assert per_head.tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("key", ["chunk_count", "chunk_size"])
def test_a_number_of_chunks_that_no_file_can_hold(imatrix, tmp_path, key):
    path = tmp_path / "a.gguf"
    imatrix.save(path)
    data = bytearray(path.read_bytes())
    at = data.index(f"imatrix.{key}".encode()) + len(f"imatrix.{key}") + 4  # after the type of the value
    data[at : at + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"imatrix.{key} is 4294967295; a file can hold 0 to 2147483647"):
        load(path)
