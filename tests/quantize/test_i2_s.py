"""i2_s of BitNet's files: read by its definition, and encoded in the ternary types without a loss."""

import numpy as np
import pytest

from ggufmill import quantize_model
from ggufmill.convert import open_source
from ggufmill.formats import FormatError, TensorType
from ggufmill.formats.gguf_header import header_bytes

STORED = TensorType("i2_s", 36, None, 128, 32)  # without the scale behind the last row
SCALE = np.float32(0.75)


def write(path, columns: int, rows: int, tail: bytes) -> np.ndarray:
    """A GGUF of one tensor of random -1, 0, 1 times SCALE; returns them."""
    values = np.random.default_rng(6).integers(-1, 2, (rows, columns))
    packed = np.zeros((rows * columns // 128, 32), np.uint8)
    for i, block in enumerate(values.reshape(-1, 128)):
        for e, value in enumerate(block):
            packed[i, e % 32] |= (value + 1) << (6 - 2 * (e // 32))
    header, offsets, _ = header_bytes(
        {"general.architecture": "bitnet"}, [("blk.0.ffn_up.weight", (columns, rows), STORED)], 32
    )
    padding = bytes(max(0, offsets[0] - len(header)))
    path.write_bytes(header + padding + packed.tobytes() + tail)
    return values * SCALE


def test_tensors_are_read_and_become_ternary_types(tmp_path):
    values = write(tmp_path / "a.gguf", 256, 6, SCALE.tobytes() + bytes(28))
    (tensor,) = open_source(tmp_path / "a.gguf").tensors.values()
    assert (tensor.source_type, tensor.stored, tensor.shape) == ("i2_s", None, (256, 6))
    for start, stop in ((0, 6), (2, 3), (5, 6)):
        assert np.array_equal(tensor.read(start, stop), values[start:stop])
    for name in ("tq1_0", "tq2_0", "iq2_bn"):
        quantize_model(tmp_path / "a.gguf", tmp_path / f"{name}.gguf", name, pure=True)
        (written,) = open_source(tmp_path / f"{name}.gguf").tensors.values()
        assert written.source_type == name
        assert np.array_equal(written.read(0, 6), values)


@pytest.mark.parametrize(("columns", "tail"), [(64, bytes(32)), (256, b"")])
def test_rows_and_sizes_that_cannot_be(tmp_path, columns, tail):
    write(tmp_path / "a.gguf", 256, 6, tail)
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4
    data[at : at + 8] = columns.to_bytes(8, "little")
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=f"blk.0.ffn_up.weight is i2_s of {columns} columns"):
        list(open_source(tmp_path / "a.gguf").tensors.values())
