import json
import mmap

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ggufmill.formats import FormatError
from ggufmill.formats.safetensors import open_safetensors, read_safetensors


def raw_file(path, header, body=b""):
    """A file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_files_of_the_safetensors_package(tmp_path):
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.arange(4, dtype=np.float16),
        "bf16": np.arange(4, dtype=ml_dtypes.bfloat16).reshape(2, 2),
        "i8": np.array([-1, 2], np.int8),
        "u8": np.array([200], np.uint8),
        "i32": np.array([[-7]], np.int32),
        "i64": np.array([1 << 40], np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    tensors = open_safetensors(tmp_path)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].data.tobytes() == array.tobytes()
    assert tensors["bf16"].source_type == "bf16"


def test_small_tensors_are_read_and_large_ones_mapped(tmp_path, monkeypatch):
    """A first touch of a mapped page reads ahead: 69,120 tensors of two numbers took minutes where files are not in memory."""
    save_file({"few": np.arange(2), "many": np.arange(1000)}, tmp_path / "model.safetensors")
    tensors, mapped = open_safetensors(tmp_path), []
    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *a, **k: mapped.append(a) or real(*a, **k))
    assert tensors["few"].data.tolist() == [0, 1]
    assert not mapped
    assert tensors["many"].data.tolist() == list(range(1000))
    assert len(mapped) == 1
    assert not tensors["few"].data.flags.writeable
    assert not tensors["many"].data.flags.writeable


@pytest.mark.parametrize(("dtype", "name"), [("F8_E4M3", "f8_e4m3"), ("F8_E5M2", "f8_e5m2")])
def test_fp8(tmp_path, dtype, name):
    raw_file(tmp_path / "a.safetensors", {"w": entry(dtype, (2, 2), (0, 4))}, bytes([1, 2, 3, 255]))
    tensor = read_safetensors(tmp_path / "a.safetensors")["w"]
    assert tensor.source_type == name
    assert tensor.data.tolist() == [[1, 2], [3, 255]]


def sharded(folder, weight_map):
    for shard in set(weight_map.values()):
        names = [n for n, s in weight_map.items() if s == shard]
        save_file({n: np.ones(2, np.float32) for n in names}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_file_orders_the_shards(tmp_path):
    sharded(tmp_path, {"b": "m-2.safetensors", "a": "m-1.safetensors"})
    assert list(open_safetensors(tmp_path)) == ["a", "b"]


def test_a_missing_shard_and_a_missing_tensor(tmp_path):
    sharded(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "c": "m-1.safetensors"}}))
    with pytest.raises(FormatError, match="names 1 tensors that no shard holds, the first is c"):
        open_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "c": "m-9.safetensors"}}))
    with pytest.raises(FormatError, match="1 of 2 shards are missing, the first is m-9"):
        open_safetensors(tmp_path)
    index.write_text("[]")
    with pytest.raises(FormatError, match="not an index"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_name_files_in_other_folders(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="shard"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        ({"w": 5}, "lacks dtype"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "lacks dtype"),
        ({"w": entry("F99")}, "dtype F99"),
        ({"w": entry(shape=(-2,))}, "impossible"),
        ({"w": entry(shape=(1.5,))}, "impossible"),
        ({"w": entry(shape=(3,))}, "does not take 8 bytes"),
        ({"w": entry(offsets=(8, 0))}, "impossible"),
        ({"w": entry(offsets=(100, 108))}, "shorter than its header says"),
        ({"w": entry(), "v": entry(offsets=(4, 12))}, "overlaps"),
        ({"w": entry(shape=(1 << 59, 1 << 59), offsets=(0, 8))}, "does not take 8 bytes"),
        ({"w": entry(), "v": 0}, "v lacks dtype"),
        (b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), "names a tensor twice"),
        ({"__metadata__": entry(), "w": entry()}, "names a tensor twice"),
    ],
)
def test_malformed(tmp_path, header, message):
    with pytest.raises(FormatError, match=message):
        read_safetensors(raw_file(tmp_path / "a.safetensors", header, bytes(16)))


def test_truncated_and_absent(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(FormatError, match="truncated"):
        read_safetensors(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"123")
    with pytest.raises(FormatError, match="too few"):
        read_safetensors(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FormatError, match=r"no \*.safetensors"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("dtype", [["F32"], {"F32": 1}, 5, None])
def test_a_dtype_that_is_not_a_string(tmp_path, dtype):
    raw_file(tmp_path / "a.safetensors", {"w": entry(dtype)}, bytes(8))
    with pytest.raises(FormatError, match="tensor w has dtype .*; known are"):
        read_safetensors(tmp_path / "a.safetensors")


def test_an_index_nested_too_deep(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="not an index of safetensors shards"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_torch_files_are_refused_with_what_to_do(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(FormatError, match=f"weights are in {name}, a torch file, .* save them as safetensors first"):
        open_safetensors(tmp_path)
