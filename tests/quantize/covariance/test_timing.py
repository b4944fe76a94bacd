"""Predicted seconds of encoding with covariances: by widths, with what preparing costs, each covariance once."""

from math import prod

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import timing as ordinary
from ggufmill.quantize.covariance import timing
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.prepared import prepare
from ggufmill.quantize.covariance.row_blocks import row_blocks
from ggufmill.quantize.covariance.source import CollectedInput, CollectedOutput, Covariances, Curvature, PreparedCache

NARROW, WIDE = 256, 512
SHAPES = {"a": (256, 64), "b": (256, 64), "c": (1024, 32), "d": (256, 64)}  # d has no covariance


def covariances(curvature, tokens=9999):
    columns = {name: shape[0] for name, shape in SHAPES.items() if name != "d"}

    def input_of(name):
        return CollectedInput(columns[name], np.array([tokens if name == "c" else 9999])) if name in columns else None

    def output_of(name):
        rows = SHAPES[name][1]
        return CollectedOutput(row_blocks(rows, rows, 32), np.full((1, -(-rows // 32)), 9999))

    cache = PreparedCache(lambda name, matrix: None, key_of=lambda name, matrix: "ab" if name in "ab" else name)
    outputs = Curvature(output_of, lambda *_: Covariance(np.eye(1, dtype=np.float32), 1), 9999) if curvature else None
    return Covariances(input_of, cache, "", {}, 1, curvature=outputs)


class Source:
    def __init__(self):
        common = {"source_type": "f32"}
        tensors = ({"name": name, "shape": shape, "n_elements": prod(shape)} | common for name, shape in SHAPES.items())
        self.tensors = {fields["name"]: type("Tensor", (), fields) for fields in tensors}


@pytest.fixture
def constants(monkeypatch):
    """1 us a weight of 256 columns and 2 of 512, so 4 of 1,024, and twice that for rows that are encoded together; 3 s for a
    covariance of 512 columns, or for coupling 128 rows."""
    monkeypatch.setattr(timing, "_WIDTHS", (NARROW, WIDE))
    monkeypatch.setattr(timing, "_COUPLED_ROWS", (128, 512))
    monkeypatch.setattr(timing, "_preparing_seconds", lambda sample, columns: 3 * (columns / WIDE) ** 3)
    monkeypatch.setattr(timing, "_coupling_seconds", lambda sample: 3.0)
    monkeypatch.setattr(ordinary, "encode_speed", lambda kind, threads, **_: 1e6 * threads)
    monkeypatch.setattr(ordinary, "REST", 0.0)

    def seconds(sample, type_name, together, columns, threads):
        return columns / NARROW * (2e-6 if together > 1 else 1e-6)

    monkeypatch.setattr(timing, "_seconds_of_a_weight", seconds)


def predicted(covariances):
    produce = lambda start, stop: np.zeros((stop - start, 0), np.uint8)  # noqa: E731
    outputs = [Output(name, shape, "f32", TYPES["q4_K"], "", produce) for name, shape in SHAPES.items()]
    return timing.predict_seconds_with(covariances, Source(), make_plan(outputs, {}, "out.gguf"), 2)


@pytest.mark.parametrize("curvature", [False, True])
def test_widths_and_preparing(constants, curvature):
    found = predicted(covariances(curvature))
    size, more = 256 * 64, 2 if curvature else 1
    assert found["q4_K"] == pytest.approx((2 * size + 4 * 32 * 1024) * 1e-6 * more / 2 + size * 1e-6 / 2)
    preparing = (0.5**3 + 2**3) * 3  # a and b have one
    coupling = 5 * (32 / 128) ** 3 * 3 if curvature else 0
    assert found[timing.PREPARING] == pytest.approx((preparing + coupling) / 2)


def test_a_covariance_of_too_few_tokens_takes_no_time(constants):
    """c is encoded by its diagonal alone, as d is, and its rows by themselves."""
    found = predicted(covariances(True, tokens=10))
    assert found["q4_K"] == pytest.approx((2 * 256 * 64 * 2 + 256 * 64 + 1024 * 32) * 1e-6 / 2)
    assert found[timing.PREPARING] == pytest.approx((0.5**3 * 3 + 4 * (32 / 128) ** 3 * 3) / 2)


def test_a_sample_has_what_was_collected_of_a_tensor(monkeypatch):
    """How many sweeps codes take depends on the covariance: one of few tokens took 1.6 times as long as random ones."""
    monkeypatch.setattr(timing, "_WIDTHS", (8, 16))
    rng = np.random.default_rng(0)
    inputs, gradients = rng.standard_normal((40, 32), np.float32), rng.standard_normal((300, 256), np.float32)
    moments = Covariance(inputs.T @ inputs / 40, 40)
    outputs = Covariance(gradients.T @ gradients / 300, 300)
    weights = rng.standard_normal((256, 32), np.float32)
    collected = CollectedInput(32, np.array([40]))
    rows = CollectedOutput(row_blocks(256, 256, 256), np.array([[300]]))
    curvature = Curvature(lambda name: rows, lambda *_: outputs, 40)
    tensor = SourceTensor("a", (32, 256), "f32", lambda start, stop: weights[start:stop])
    cache = PreparedCache(lambda name, matrix: moments)
    sample = timing._Sample(Covariances(lambda name: collected, cache, "", {}, 1, curvature=curvature), tensor)
    assert sample.columns == 32
    assert np.array_equal(sample.rows(4, 16), weights[:4, :16])
    expected = prepare(Covariance(np.ascontiguousarray(moments.matrix[:16, :16]), 20))
    assert np.array_equal(sample.prepared(16).damped.triangle, expected.damped.triangle)
    assert np.array_equal(sample.gradients(128).matrix, outputs.matrix[:128, :128])
    assert sample.gradients(128).tokens == 150
    assert sample.gradients(1024).columns == 256
    empty = PreparedCache(lambda name, matrix: None)
    nothing = timing._Sample(Covariances(lambda name: collected, empty, "", {}, 1, curvature=curvature), tensor)
    assert nothing.columns == 16
    assert nothing.rows(4, 16).shape == (4, 16)
    assert nothing.gradients(128).columns == 128


def test_tensors_of_a_narrow_model_are_samples_of_themselves(constants, monkeypatch):
    """256 columns were timed on random ones of 1,024: 5.3 s were said of a small model's curvature that took 6.9."""
    used = []
    monkeypatch.setattr(timing, "_WIDTHS", (4 * NARROW, 8 * NARROW))
    monkeypatch.setattr(timing._Sample, "columns", NARROW)
    monkeypatch.setattr(
        timing, "_seconds_of_a_weight", lambda sample, name, together, columns, threads: used.append(columns) or 0.0
    )
    predicted(covariances(False))
    assert set(used) == {NARROW}


def test_types_in_blocks_are_timed_on_whole_blocks(constants, monkeypatch):
    """Of a sample of 352 columns q4_K has 256: 352 were an error of its forecast."""
    used = []
    monkeypatch.setattr(timing, "_WIDTHS", (4 * NARROW, 8 * NARROW))
    monkeypatch.setattr(timing._Sample, "columns", NARROW + 96)
    monkeypatch.setattr(timing, "_seconds_of_a_weight", lambda *given: used.append(given[3]) or 0.0)
    predicted(covariances(False))
    assert set(used) == {NARROW}


def test_columns_fewer_than_the_narrower_width_are_on_a_line_of_their_own(constants, monkeypatch):
    """256 columns were said what 768, the most of the demo, take: 2.0 s of 1.5."""
    monkeypatch.setattr(timing, "_WIDTHS", (4 * NARROW, 8 * NARROW))
    encodings, source = timing.Encodings(covariances(False)), Source()
    for columns in (64, NARROW, 2 * NARROW, 4 * NARROW, 8 * NARROW):
        encodings._weights[timing._Work("q4_K", columns, 1)] = 1
    encodings._tensors[False, False, 0] = source.tensors["a"]
    monkeypatch.setattr(timing._Sample, "columns", 8 * NARROW)
    assert encodings.seconds(1)["q4_K"] == pytest.approx((1 + 1 + 2 + 4 + 8) * 1e-6)
    asked = []
    monkeypatch.setattr(timing, "_seconds_of_a_weight", lambda *given: asked.append(given[3]) or 0.0)
    for columns in (64, NARROW, 2 * NARROW):
        del encodings._weights[timing._Work("q4_K", columns, 1)]
    encodings.seconds(1)
    assert set(asked) == {4 * NARROW, 8 * NARROW}


@pytest.mark.parametrize(("together", "measured"), [(128, 128), (256, 256), (512, 512), (2048, 512)])
def test_rows_that_are_encoded_together_take_longer_the_more_there_are(constants, monkeypatch, together, measured):
    """At the narrower width, with as many rows as there are, or the most of a sample; columns as for the fewest of them."""
    asked = set()

    def seconds(sample, type_name, together, columns, threads):
        asked.add((together, columns))
        return columns * 1e-6 + (together - 128) * 1e-9

    monkeypatch.setattr(timing, "_seconds_of_a_weight", seconds)
    encodings = timing.Encodings(covariances(False))
    encodings._weights[timing._Work("q4_K", 1024, together)] = 1000
    found = encodings.seconds(2)["q4_K"]
    assert found == pytest.approx(1000 * (1024 * 1e-6 + (together - 128) * 1e-9) / 2)
    assert asked == {(128, NARROW), (128, WIDE), (measured, NARROW)}


def test_rows_of_a_sample_are_encoded_together(monkeypatch):
    """Each number of rows, on random moments, without and with others; whole groups of types that interleave rows."""
    monkeypatch.setattr(timing, "_timed_before", {})
    sample = timing._Sample(covariances(False), None)
    assert timing._seconds_of_a_weight(sample, "q4_k_r4", 1, 768, 1) > 0
    assert all(timing._seconds_of_a_weight(sample, "q4_K", rows, 256, 1) > 0 for rows in (1, 32, 64))
    assert len(timing._timed_before) == 4
