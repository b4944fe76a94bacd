"""`convert-endian`: the bytes of the gguf package's converter, and back."""

import importlib
import struct
import sys

import gguf
import numpy as np
import pytest

from ggufmill.formats import TYPES, FormatError, open_gguf
from ggufmill.formats.byte_order import swap_header
from ggufmill.formats.gguf_header import header_bytes

COMMON = ["f32", "f16", "bf16", "q4_0", "q8_0", "q4_K", "q6_K", "mxfp4", "nvfp4"]  # known to the gguf package
METADATA = {
    "general.architecture": "llama",
    "a.int": np.int32(-5),
    "a.small": np.uint16(300),
    "a.real": np.float64(0.1),
    "a.flag": True,
    "a.many": np.arange(7, dtype=np.int64),
    "a.flags": np.array([True, False]),
    "a.words": ["", "Grüße"],
}


def write(path, types, metadata=METADATA, alignment=32):
    entries = [(f"t.{name}", (512, 3), TYPES[name]) for name in types]
    header, offsets, size = header_bytes(metadata, entries, alignment)
    random, content = np.random.default_rng(1), bytearray(header + bytes(size - len(header)))
    for (_, shape, kind), offset in zip(entries, offsets, strict=True):
        content[offset : offset + kind.nbytes(shape)] = random.bytes(kind.nbytes(shape))
    path.write_bytes(content)
    return path


def test_the_bytes_of_the_gguf_package(mill, tmp_path, monkeypatch):
    source = write(tmp_path / "m.gguf", COMMON)
    code, out, _ = mill("convert-endian", source, tmp_path / "be.gguf")
    assert (code, "big-endian, 9 tensors" in out) == (0, True)
    theirs = tmp_path / "theirs.gguf"
    theirs.write_bytes(source.read_bytes())
    monkeypatch.setattr(sys, "argv", ["convert", str(theirs), "big"])
    monkeypatch.setattr("builtins.input", lambda prompt: "YES")
    importlib.import_module("gguf.scripts.gguf_convert_endian").main()
    assert (tmp_path / "be.gguf").read_bytes() == theirs.read_bytes()
    assert gguf.GGUFReader(tmp_path / "be.gguf").fields["a.small"].contents() == 300


@pytest.mark.parametrize("alignment", [32, 4096])
def test_twice_is_the_same_file(mill, tmp_path, alignment):
    metadata = METADATA | {"general.alignment": np.uint32(alignment), "a.nested": [["x"], ["y"]]}
    types = [*COMMON, "q4_1", "q2_K", "q5_K", "iq4_nl", "tq1_0", "tq2_0", "i8", "i16", "i32", "i64", "f64"]
    source = write(tmp_path / "m.gguf", types, metadata, alignment)
    assert mill("convert-endian", source, tmp_path / "be.gguf")[0] == 0
    with pytest.raises(FormatError, match="big-endian"):
        open_gguf(tmp_path / "be.gguf")
    assert mill("convert-endian", tmp_path / "be.gguf", tmp_path / "le.gguf")[0] == 0
    assert len(open_gguf(tmp_path / "le.gguf").tensors) == len(types)
    assert (tmp_path / "le.gguf").read_bytes() == source.read_bytes()


def test_scales_of_blocks_are_numbers_of_two_bytes():
    """The places of half-precision numbers follow from the layouts."""
    from ggufmill.formats.byte_order import _HALVES
    from ggufmill.formats.layouts import layout_of

    for name, places in _HALVES.items():
        layout = layout_of(name)
        halves = [bits for bits in (layout.d, layout.dmin, layout.offset) if bits is not None and bits.shape[-1] == 16]
        assert sorted(int(bits.min()) // 8 for bits in halves) == sorted(places), name


def test_other_types_are_refused(mill, tmp_path):
    source = write(tmp_path / "m.gguf", ["f32", "iq2_xxs"])
    code, _, err = mill("convert-endian", source, tmp_path / "be.gguf")
    assert (code, "t.iq2_xxs is iq2_xxs, which has no agreed form" in err) == (1, True)
    assert not (tmp_path / "be.gguf").exists()


def test_damaged_headers_end_in_one_line(tmp_path):
    data = write(tmp_path / "m.gguf", ["f32"]).read_bytes()
    for cut in range(0, len(data) - 1, 7):
        with pytest.raises(FormatError):
            swap_header(tmp_path / "m.gguf", memoryview(data[:cut]), "little")


@pytest.mark.parametrize("offsets", [(0, 63), (0, 0), (0, 512 * 3 * 4 - 1)])
def test_overlapping_tensors_are_refused(mill, tmp_path, offsets):
    source = write(tmp_path / "m.gguf", ["f32", "f16"])
    data = bytearray(source.read_bytes())
    for name, offset in zip((b"t.f32", b"t.f16"), offsets, strict=True):
        at = data.index(name) + len(name) + 4 + 16 + 4  # after the number of dimensions, two of them, and the type
        data[at : at + 8] = struct.pack("<Q", offset)
    source.write_bytes(data)
    code, _, err = mill("convert-endian", source, tmp_path / "be.gguf")
    assert (code, "tensors t.f" in err, "overlap" in err) == (1, True, True)
    assert not (tmp_path / "be.gguf").exists()


def test_shards_and_other_files_are_refused(mill, tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"nothing of this kind")
    assert "not a GGUF file" in mill("convert-endian", tmp_path / "no.gguf", tmp_path / "o.gguf")[2]
    source = write(tmp_path / "m-00001-of-00002.gguf", ["f32"])
    assert "`ggufmill merge` it first" in mill("convert-endian", source, tmp_path / "o.gguf")[2]
