"""Weights that types hardly hold: zeros, no importance, rows that do not fit, scales out of range."""

import json

import numpy as np
import pytest
from failures import error_line

from ggufmill.formats import TYPES, open_gguf
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.imatrix.entries import Imatrix


def write_gguf(path, **tensors):
    entries = [(name.replace("_w", ".weight"), x.shape[::-1], TYPES["f32"]) for name, x in tensors.items()]
    header, offsets, size = header_bytes({"general.architecture": "llama"}, entries, 32)
    data = bytearray(size)
    data[: len(header)] = header
    for offset, x in zip(offsets, tensors.values(), strict=True):
        data[offset : offset + x.nbytes] = x.tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["iq2_xxs", "iq1_s", "q4_0"])
def test_rows_of_zeros(mill, tmp_path, kind):
    x = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    x[2:5] = 0
    source = write_gguf(tmp_path / "a.gguf", a_w=x, b_w=np.zeros((8, 256), np.float32))
    entry = (np.ones((1, 256), np.float32), np.array([512], np.int64))
    empty = (np.zeros((1, 256), np.float32), np.array([512], np.int64))
    Imatrix({"a.weight": entry, "b.weight": entry, "c.weight": empty}, ["t"], 1).save(tmp_path / "i.dat")
    out = tmp_path / "out.gguf"
    code, text, err = mill("quantize", source, out, kind, "--pure", "--imatrix", tmp_path / "i.dat", "--verify", "--json")
    assert code == 0, err
    assert json.loads(text)["verification"]["problems"] == []
    assert mill("inspect", out, "--check")[0] == 0


def test_importance_that_is_missing_for_one_tensor(mill, tmp_path):
    x = np.ones((8, 256), np.float32)
    source = write_gguf(tmp_path / "a.gguf", a_w=x, b_w=x)
    Imatrix({"a.weight": (np.ones((1, 256), np.float32), np.array([512], np.int64))}, ["t"], 1).save(tmp_path / "i.dat")
    command = ("quantize", source, tmp_path / "out.gguf", "iq2_xxs", "--pure", "--imatrix", tmp_path / "i.dat")
    line = error_line(mill(*command), tmp_path / "out.gguf")
    assert "b.weight is to become iq2_xxs, which needs importance data, and the imatrix has no entry for it" in line
    planned = ("quantize", *command[1:3], "iq2_xxs", "--custom-q", "b.weight=q8_0", *command[-2:])
    assert mill(*planned)[0] == 0


def test_rows_that_no_quantised_type_fits(mill, tmp_path):
    x = np.random.default_rng(1).normal(size=(8, 33)).astype(np.float32)
    source = write_gguf(tmp_path / "a.gguf", a_w=x, b_w=np.ones((4, 96), np.float32))
    command = ("quantize", source, tmp_path / "out.gguf", "q4_k")
    code, _, err = mill(*command, "--verify")
    assert code == 0, err
    types = {name: t.type.name for name, t in open_gguf(tmp_path / "out.gguf").tensors.items()}
    assert types["a.weight"] == "f16"
    assert types["b.weight"] == "q5_0"
    assert "another type than asked for" in err


@pytest.mark.parametrize("kind", ["q2_K", "q8_0", "f16"])
@pytest.mark.parametrize(("factor", "word"), [(1e-9, "small"), (1e32, "large")])
def test_weights_that_the_scales_cannot_hold(mill, tmp_path, kind, factor, word):
    x = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    source = write_gguf(tmp_path / "a.gguf", a_w=x, b_w=x * np.float32(factor))
    command = ("quantize", source, tmp_path / "out.gguf", kind, "--pure")
    assert "b.weight: row 0 (largest weight" in (line := error_line(mill(*command), tmp_path / "out.gguf"))
    assert f"is too {word} for {kind}" in line
    assert mill(*command[:-1], "--custom-q", "b.weight=bf16", "--force", "--verify")[0] == 0


def test_rows_without_weight_worth_speaking_of(mill, tmp_path):
    """Embeddings of unused tokens: a warning."""
    x = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    x[2:5] *= np.float32(1e-10)
    source = write_gguf(tmp_path / "a.gguf", a_w=x)
    code, _, err = mill("quantize", source, tmp_path / "out.gguf", "q2_K", "--pure", "--verify")
    assert code == 0
    assert "a.weight: 3 of the rows 2 to 4 have weights so small that q2_K makes them coarse or zero" in err
