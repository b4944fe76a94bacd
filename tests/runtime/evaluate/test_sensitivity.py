"""KL divergence that quantising some tensors causes."""

import re
from pathlib import Path

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, SourceTensor
from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.row_blocks import row_blocks
from ggufmill.quantize.covariance.source import RowCoupling
from ggufmill.quantize.importance import AssumedImportance
from ggufmill.quantize.row_producer import ErrorWeights
from ggufmill.recipes import FOLDER
from ggufmill.runtime.evaluate import sensitivity
from ggufmill.runtime.evaluate.sensitivity import Reference


@pytest.fixture
def reference(tiny_llama, write_checkpoint, tmp_path):
    source = open_source(write_checkpoint(tmp_path / "m", *tiny_llama()))
    tokens = np.random.default_rng(0).integers(0, 40, 64)
    return Reference(source, tokens, 16, 3, threads=1, exact=True)


def test_the_model_itself_does_not_diverge(reference):
    assert reference.divergence(reference.source).mean == pytest.approx(0, abs=1e-9)
    assert reference.with_types({"output.weight": TYPES["f32"]}, None).mean == pytest.approx(0, abs=1e-7)


def test_smaller_types_and_more_tensors_diverge_more(reference):
    def kld(type_name, *names):
        return reference.with_types(dict.fromkeys(names, TYPES[type_name]), None).mean

    one = [kld(type_name, "blk.0.attn_output.weight") for type_name in ("q8_0", "q5_0", "q4_0")]
    assert 0 < one[0] < one[1] < one[2]
    assert kld("q4_0", "blk.0.attn_output.weight", "output.weight", "blk.1.attn_q.weight") > one[2]


def test_error_is_that_of_the_mean(reference):
    divergence = reference.with_types({"output.weight": TYPES["q4_0"]}, None)
    assert 0 < divergence.error < divergence.mean


def test_a_choice_encodes_what_differs_from_the_last(reference, monkeypatch):
    """A search that is refined changes one group of tensors after the other: it encoded all of them each time."""
    encoded = set()

    class Counted(sensitivity.RowProducer):
        def __call__(self, start, stop):
            encoded.add(self.tensor.name)
            return super().__call__(start, stop)

    monkeypatch.setattr(sensitivity, "RowProducer", Counted)
    first, second = "blk.0.attn_output.weight", "output.weight"
    choice, importance = {first: TYPES["q4_0"], second: TYPES["q4_0"]}, AssumedImportance({})

    def divergence(types, data=None):
        encoded.clear()
        return reference.with_types(types, data)

    expected = divergence(choice)
    assert encoded == {first, second}
    assert divergence({**choice, second: TYPES["q5_0"]}) != expected
    assert encoded == {second}
    assert divergence(choice) == expected
    assert encoded == {second}
    weighted = divergence(choice, importance)
    assert encoded == {first, second}
    assert divergence(choice, importance) == weighted != expected
    assert not encoded


def test_rows_that_are_encoded_together_are_encoded_once_whatever_is_read_of_them(monkeypatch):
    """An embedding reads row by row, and each row was a block of them that was encoded."""
    x, made = np.random.default_rng(0).standard_normal((96, 256)).astype(np.float32), []
    tensor = SourceTensor("a", (256, 48, 2), "f32", lambda start, stop: made.append((start, stop)) or x[start:stop])
    blocks = row_blocks(48, 48, 32)
    coupling = RowCoupling(blocks, np.zeros((2, 2)), 1, lambda *_: None, np.zeros((2, 2), bool))
    monkeypatch.setattr(sensitivity.ErrorWeights, "of", lambda *_: ErrorWeights(coupling=coupling))
    encoded = sensitivity._EncodedRows(1 << 20)
    encoded.choose({"a": TYPES["q4_0"]}, None, None)
    rows = encoded.tensor(tensor, TYPES["q4_0"])
    expected = decode(encode(x, "q4_0"), "q4_0", 256)
    for start, stop in ((5, 6), (6, 7), (50, 51), (24, 48), (20, 40)):
        assert np.array_equal(rows.read(start, stop), expected[start:stop])
    assert made == [(0, 32), (48, 80), (32, 48)]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_models_that_were_measured_take_no_memory():
    """Parts of a model refer to each other, so that its activations and decoded weights stayed."""
    tokens = np.random.default_rng(0).integers(3, 1000, 1024)
    reference = Reference(open_source(FOLDER / "demo"), tokens, 512, 2, exact=True)

    def taken():
        reference.with_types({"blk.1.ffn_gate_exps.weight": TYPES["q4_0"]}, None)
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text("utf-8"))
        return int(found[1]) << 10

    first = taken()
    assert max(taken() for _ in range(6)) < first + (80 << 20)
