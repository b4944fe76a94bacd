import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, FormatError, PlanError, open_gguf
from ggufmill.formats.gguf_header import header_bytes, header_layout
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize.gguf_source import gguf_source

METADATA = {
    "general.architecture": "llama",
    "a.u8": np.uint8(200),
    "a.i8": np.int8(-3),
    "a.u16": np.uint16(60000),
    "a.i16": np.int16(-300),
    "a.u32": np.uint32(4_000_000_000),
    "a.i32": np.int32(-5),
    "a.f32": np.float32(0.1),
    "a.u64": np.uint64(1 << 60),
    "a.i64": np.int64(-(1 << 60)),
    "a.f64": np.float64(0.1),
    "a.bool": True,
    "a.text": "Grüße, 世界",
    "a.floats": np.array([1.5, -2.5], np.float32),
    "a.flags": np.array([True, False, True]),
    "a.words": ["", "a", "ab\nc"],
    "a.none": np.array([], np.int32),
    "a.nested": [["x"], ["y", "z"]],
}


def write(path, arrays, metadata=None, **split):
    """A GGUF file of float32 tensors; arrays: name -> array, shape outermost first."""
    f32 = TYPES["f32"]
    outputs = [Output(n, tuple(a.shape[::-1]), "f32", f32, "test", _rows(a.astype(np.float32))) for n, a in arrays.items()]
    plan = make_plan(outputs, metadata or METADATA, path, **split)
    execute(plan, threads=2)
    return plan


def _rows(array):
    flat = array.reshape(-1, array.shape[-1])
    return lambda start, stop: flat[start:stop].view(np.uint8)


def same(a, b):
    return type(a) is type(b) and (np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b)


def test_round_trip_keeps_every_value_type(tmp_path):
    arrays = {"t.one": np.arange(6.0).reshape(2, 3), "t.two": np.arange(24.0).reshape(2, 3, 4), "t.three": np.arange(5.0)}
    write(tmp_path / "a.gguf", arrays)
    file = open_gguf(tmp_path / "a.gguf")
    assert list(file.metadata) == list(METADATA)
    for key, value in METADATA.items():
        assert same(file.metadata[key], value), key
    for name, array in arrays.items():
        info = file.tensors[name]
        assert info.shape == array.shape[::-1]
        assert np.array_equal(info.data.view(np.float32).reshape(array.shape), array)


def test_the_gguf_package_reads_our_files(tmp_path):
    array = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    metadata = {k: v for k, v in METADATA.items() if k != "a.nested"}  # GGUFReader does not support it
    write(tmp_path / "a.gguf", {"t": array}, metadata)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["a.text"].contents() == "Grüße, 世界"
    assert reader.fields["a.u64"].contents() == 1 << 60
    assert np.array_equal(reader.tensors[0].data, array)


def test_reads_files_of_the_gguf_package(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("x.count", 7)
    writer.add_array("x.words", ["eins", "zwei"])
    array = np.arange(64, dtype=np.float32).reshape(2, 32)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("w", gguf.quants.quantize(array, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "a.gguf")
    assert file.metadata["x.count"] == 7
    assert file.metadata["x.words"] == ["eins", "zwei"]
    assert file.tensors["w"].type.name == "q8_0"
    assert file.tensors["w"].data.shape == (2, 34)


def test_a_split_model_opens_as_one(tmp_path):
    arrays = {f"t{i}": np.full((4, 8), i, np.float32) for i in range(5)}
    plan = write(tmp_path / "m.gguf", arrays, split_max_tensors=2)
    assert [f.path.name for f in plan.files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for shard in plan.files:  # any shard opens the model
        file = open_gguf(shard.path)
        assert len(file.paths) == 3
        assert list(file.tensors) == list(arrays)
        assert file.metadata.keys() == METADATA.keys()
        assert all((file.tensors[n].data.view(np.float32) == a).all() for n, a in arrays.items())
    plan.files[1].path.unlink()
    with pytest.raises(FormatError, match="1 of 3 shards are missing, the first is m-00002-of-00003"):
        open_gguf(plan.files[0].path)


def test_split_by_size(tmp_path):
    plan = write(tmp_path / "m.gguf", {f"t{i}": np.ones((64, 64), np.float32) for i in range(4)}, split_max_size=34_600)
    assert [sum(p.file == i for p in plan.locations) for i in range(len(plan.files))] == [2, 2]
    assert all(f.path.stat().st_size == f.nbytes <= 34_600 for f in plan.files)
    plan = write(tmp_path / "n.gguf", {f"t{i}": np.ones((64, 64), np.float32) for i in range(4)}, split_max_size=33_000)
    assert all(f.nbytes <= 33_000 for f in plan.files)
    assert len(plan.files) > 2


def test_shards_keep_another_alignment(tmp_path):
    arrays = {f"t{i}": np.full((3, 5), i, np.float32) for i in range(5)}
    plan = write(tmp_path / "m.gguf", arrays, METADATA | {"general.alignment": np.uint32(256)}, split_max_tensors=2)
    tensors = open_gguf(plan.files[0].path).tensors
    assert all(np.array_equal(tensors[n].data.view(np.float32), a) for n, a in arrays.items())
    assert all(t.offset % 256 == 0 for t in tensors.values())


@pytest.mark.parametrize("alignment", [0, 7, -1, 1 << 21, "abc", True, 4])
def test_an_invalid_alignment_is_not_written(tmp_path, alignment):
    with pytest.raises(PlanError, match="general.alignment"):
        write(tmp_path / "m.gguf", {"t": np.ones((2, 8))}, {"general.alignment": alignment})


def test_unknown_type_ids_are_no_error(tmp_path):
    write(tmp_path / "a.gguf", {"t.one": np.ones((2, 8)), "t.two": np.ones((2, 8))})
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    at = data.index(b"t.one") + 5 + 4 + 16  # name, n_dims, two dimensions
    data[at : at + 4] = struct.pack("<I", 12345)
    (tmp_path / "b.gguf").write_bytes(data)
    info = open_gguf(tmp_path / "b.gguf").tensors["t.one"]
    assert info.type.name == "type-12345"
    assert not info.type.is_known
    assert info.nbytes == 64


@pytest.mark.parametrize(
    ("type_id", "nbytes", "name"),
    [(142, 64 * 34, "pq2_0"), (142, 32 * 66, "type-142"), (143, 64 * 28, "ptq1_0"), (143, 32 * 44, "type-143")],
)
def test_types_that_share_an_id_are_told_apart_by_their_size(tmp_path, type_id, nbytes, name):
    """Blocks of 128 of Prism's types, or blocks of 256 of those that were withdrawn: 32 rows of 256 elements."""
    write(tmp_path / "a.gguf", {"t.one": np.ones((1, nbytes // 4)), "t.two": np.ones((2, 8))})
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    at = data.index(b"t.one") + 5 + 4
    data[at : at + 20] = struct.pack("<QQI", 256, 32, type_id)
    (tmp_path / "b.gguf").write_bytes(data)
    info = open_gguf(tmp_path / "b.gguf").tensors["t.one"]
    assert (info.type.name, info.type.id, info.type.is_known) == (name, type_id, False)


def test_a_large_vocabulary(tmp_path):
    words = [f"token{i}" for i in range(200_000)]
    header, _, _ = header_bytes({"tokenizer.ggml.tokens": words}, [], 32)
    (tmp_path / "v.gguf").write_bytes(header)
    assert open_gguf(tmp_path / "v.gguf").metadata["tokenizer.ggml.tokens"] == words


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "a.gguf"
    write(path, {"t.one": np.ones((2, 8)), "t.two": np.ones((3, 8))})
    return path.read_bytes()


@pytest.mark.parametrize("length", [0, 3, 23, 24, 60, 200, 500, -1])
def test_truncated(good, tmp_path, length):
    (tmp_path / "a.gguf").write_bytes(good[:length])
    with pytest.raises(FormatError, match=r"a\.gguf: "):
        open_gguf(tmp_path / "a.gguf")


def patched(good, tmp_path, marker, skip, value):
    data = bytearray(good)
    at = data.index(marker) + len(marker) + skip
    data[at : at + len(value)] = value
    (tmp_path / "a.gguf").write_bytes(data)
    return tmp_path / "a.gguf"


@pytest.mark.parametrize(
    ("marker", "skip", "value", "message"),
    [
        (b"GGUF", 0, struct.pack("<I", 2), "version 2"),
        (b"GGUF", 0, struct.pack(">I", 3), "big-endian"),
        (b"GGUF", 4, struct.pack("<Q", 1 << 60), "tensors are announced"),
        (b"GGUF", 12, struct.pack("<Q", 1 << 60), "metadata entries are announced"),
        (b"a.words", 4 + 4, struct.pack("<Q", 1 << 40), "strings of a.words"),
        (b"a.floats", 4 + 4, struct.pack("<Q", 1 << 60), "values of a.floats"),
        (b"a.text", 0, struct.pack("<I", 77), "unknown value type 77"),
        (b"t.one", 0, struct.pack("<I", 9), "9 dimensions"),
        (b"t.one", 4, struct.pack("<Q", 0), "impossible shape"),
        (b"t.one", 4, struct.pack("<Q", 1 << 50), "beyond the end"),
        (b"t.one", 4 + 16, struct.pack("<I", 12), "q4_K, which cannot hold rows of 8"),
        (b"t.two", 4 + 16 + 4, struct.pack("<Q", 32), "overlap"),
        (b"t.two", 4 + 16 + 4, struct.pack("<Q", 33), "alignment"),
    ],
)
def test_malformed(good, tmp_path, marker, skip, value, message):
    with pytest.raises(FormatError, match=message):
        open_gguf(patched(good, tmp_path, marker, skip, value))


NOT_INTEGERS = ("7", np.array([7], np.uint16), ["7"], np.float32("nan"), np.float32(7), True, [["7"]])


@pytest.mark.parametrize("value", [*NOT_INTEGERS, np.uint32(0), np.uint32(48), np.int32(-32), np.uint32(1 << 30)], ids=repr)
def test_an_alignment_of_the_wrong_type(tmp_path, value):
    header, _, _ = header_bytes({"general.alignment": value}, [], 32)
    (tmp_path / "a.gguf").write_bytes(header)
    with pytest.raises(FormatError, match=r"a\.gguf: general\.alignment is .*(a whole number is needed|power of two)"):
        open_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize(("key", "shard"), [("split.count", 1), ("split.no", 2), ("split.tensors.count", 1)])
def test_split_keys_of_the_wrong_type(tmp_path, key, shard, value):
    for number in (1, 2):
        header, _, _ = header_bytes({key: value} if number == shard else {"a.key": "text"}, [], 32)
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(header)
    with pytest.raises(FormatError, match=rf"m-0000{shard}-of-00002\.gguf: {key} is .*; a whole number is needed"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_identity_changes_with_any_shard(tmp_path):
    plan = write(tmp_path / "m.gguf", {f"t{i}": np.ones((4, 8)) for i in range(3)}, split_max_tensors=2)
    first = open_gguf(plan.files[0].path).identity
    assert open_gguf(plan.files[1].path).identity == first
    for file in plan.files:  # other weights of the same size: the same header, another modification time
        with file.path.open("r+b") as shard:
            shard.seek(-4, 2)
            shard.write(b"\1\2\3\4")
        os.utime(file.path, ns=(1, 1))
        assert open_gguf(plan.files[0].path).identity != first
        first = open_gguf(plan.files[0].path).identity


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="directory"):
        open_gguf(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_opens_or_raises_format_error(good, tmp_path_factory, data):
    """Random bytes anywhere in the header: no other exception, no huge allocation."""
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 800))
        broken[at : at + 1] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(broken)
    try:
        for info in open_gguf(path).tensors.values():
            assert info.data.nbytes == info.nbytes
    except FormatError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_a_name_that_is_not_utf_8(tmp_path):
    header, _, size = header_bytes({"general.architecture": "llama"}, [("blk.0.XX.weight", (32, 2), TYPES["f32"])], 32)
    (tmp_path / "a.gguf").write_bytes(header.replace(b"XX", b"\xff\xfe").ljust(size, b"\0"))
    with pytest.raises(FormatError, match=r"the name of tensor 0 is not UTF-8: b'blk.0.\\xff\\xfe.weight'"):
        open_gguf(tmp_path / "a.gguf")


@pytest.mark.slow
def test_many_tensors_take_little_memory(tmp_path):
    """Less than 300 bytes each, names included."""
    count = 20_000
    tensors = [(f"blk.{i // 10}.ffn_up.{i % 10}.weight", (32, 1), TYPES["f32"]) for i in range(count)]
    header, _, size = header_bytes({"general.architecture": "llama"}, tensors, 32)
    with (tmp_path / "many.gguf").open("wb") as file:
        file.write(header)
        file.truncate(size)
    tracemalloc.start()
    try:
        opened = open_gguf(tmp_path / "many.gguf")
        source = gguf_source(opened)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300 * count
    assert (len(opened.tensors), len(source.tensors)) == (count, count)
    last = opened.tensors[tensors[-1][0]]
    assert (last.offset, last.shape, last.nbytes) == (size - 128, (32, 1), 128)


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_the_layout_is_that_of_the_header_that_is_made(alignment):
    """Of values of each kind, and of names of several bytes a character."""
    values = [
        True,
        "é",
        1,
        -1,
        0.5,
        np.float64(2),
        np.arange(3, dtype=np.int16),
        np.array([True]),
        ["a", "ü"],
        [],
        [["a"], ["b", "c"]],
    ]
    metadata = {f"key.{i}": value for i, value in enumerate(values)}
    tensors = [(f"b{'é' * i}", (32 * (i + 1), 2), TYPES[name]) for i, name in enumerate(("f32", "q8_0", "f16"))]
    header, offsets, size = header_bytes(metadata, tensors, alignment)
    assert header_layout(metadata, tensors, alignment) == (len(header), offsets, size)
    assert offsets[0] == len(header)
