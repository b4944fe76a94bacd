"""Predicted times: extrapolated from a sample; copied tensors are counted separately."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.jobs import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import decode, encode, row_producer, timing
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.planning import plan_quantize


def planned(source_type, target):
    row_bytes = TYPES[target].row_bytes(256)
    return Output("a.weight", (256, 64), source_type, TYPES[target], "", lambda a, b: np.zeros((b - a, row_bytes), np.uint8))


def test_speed_is_elements_per_second_of_the_clock():
    ticks = iter(range(1000))
    speed = timing.encode_speed(TYPES["q8_0"], 1, lambda: float(next(ticks)))
    assert speed == timing.SAMPLE / 2  # started at 0; one call, long enough at 1; stopped at 2


def test_a_sample_has_what_the_source_stores():
    """q6_K of fp8 takes three times as long as of bf16: its search goes on as long as something gets better."""
    x = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32) * np.float32(0.02)
    for name, dtype, largest in (("f8_e4m3", ml_dtypes.float8_e4m3fn, 448), ("f8_e5m2", ml_dtypes.float8_e5m2, 57344)):
        groups = x.reshape(-1, 128)
        scale = np.abs(groups).max(1, keepdims=True) / np.float32(largest)
        expected = (groups / scale).astype(dtype).astype(np.float32) * scale
        assert np.array_equal(timing.as_stored(x, name), expected.reshape(x.shape)), name
    assert np.array_equal(timing.as_stored(x, "bf16+f8_e4m3"), timing.as_stored(x, "f8_e4m3"))
    assert np.array_equal(timing.as_stored(x, "mxfp4"), decode(encode(x, "mxfp4"), "mxfp4", 512))
    assert np.array_equal(timing.as_stored(x, "q4_0_r8"), timing.as_stored(x, "q4_0"))
    assert timing.as_stored(x, "bf16") is x


def test_a_type_is_timed_for_what_is_encoded_of_it_with_importance_or_without(monkeypatch):
    asked = []

    def speed(kind, threads, *, source_type, is_weighted):
        asked.append((kind.name, source_type, is_weighted))
        return 1000.0 * threads

    monkeypatch.setattr(timing, "encode_speed", speed)
    outputs = [planned("f8_e4m3", "q6_K"), replace(planned("bf16", "q6_K"), name="b.weight")]
    seconds = timing.predict_seconds(make_plan(outputs, {}, "out.gguf"), 1)
    timing.predict_seconds(make_plan(outputs[:1], {"quantize.imatrix.file": "a.dat"}, "out.gguf"), 1)
    assert asked == [("q6_K", "f8_e4m3", False), ("q6_K", "bf16", False), ("q6_K", "f8_e4m3", True)]
    assert seconds["q6_K"] == pytest.approx(2 * 256 * 64 / 1000, rel=1e-4)
    weighed = {("q6_K", "bf16"): 256 * 64}
    assert timing.predict_seconds(make_plan(outputs, {}, "out.gguf"), 1, weighed)["q6_K"] == pytest.approx(seconds["q6_K"] / 2)


def test_threads_share_the_work_and_copies_are_not_encoded(monkeypatch):
    monkeypatch.setattr(timing, "encode_speed", lambda kind, threads, **_: {"q8_0": 1000.0}[kind.name] * threads)
    one = timing.predict_seconds(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 1)
    two = timing.predict_seconds(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 2)
    assert one == {"q8_0": pytest.approx(256 * 64 / 1000, rel=1e-4)}
    assert two["q8_0"] == pytest.approx(one["q8_0"] / 2)
    repacked = timing.predict_seconds(make_plan([planned("q4_0", "q4_0_r8")], {}, "out.gguf"), 1)
    assert list(repacked) == ["copy"]
    assert not timing.is_copied(planned("f8_e4m3", "q8_0"))


class Tensors:
    """A plan of one tensor of a source, whose runs of rows that are read are kept."""

    def __init__(self, x, **fields):
        self.runs = []
        tensor = SourceTensor("a.weight", x.shape[::-1], "bf16", self.read, **fields)
        self.x, self.tensor = x, tensor

    def read(self, start, stop):
        self.runs.append((start, stop))
        return self.x[start:stop]

    def plan(self, **given):
        source = TensorSource("", {"general.architecture": "llama"}, {"a.weight": self.tensor}, "")
        return plan_quantize(source, "out.gguf", type=TYPES["q4_0"], **given)


X = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)


def test_what_is_timed_are_the_rows_of_the_source_in_the_runs_of_the_job(monkeypatch):
    """Data, importance and decoders decide how long a weight takes; random rows of 512 columns have none of them."""
    monkeypatch.setattr(timing, "encode_speed", None)
    monkeypatch.setattr(execute, "CHUNK_ELEMENTS", 64 * 512)
    for name in ("SECONDS", "_LONGEST"):  # the number of weights ends it
        monkeypatch.setattr(timing, name, 60.0)
    tensors, importance, seen = Tensors(X), Importance({"a.weight": np.full((1, 512), 2, np.float32)}), []
    produced = row_producer.encode
    monkeypatch.setattr(row_producer, "encode", lambda x, **given: seen.append(given["importance"]) or produced(x, **given))
    seconds = timing.predict_seconds(tensors.plan(importance=importance), 1)
    assert set(seconds) == {"q4_0"}
    assert seconds["q4_0"] > 0
    assert {(0, 64), (64, 128), (128, 192), (192, 256)} <= set(tensors.runs)
    assert all(np.array_equal(one, np.full(512, 2)) for one in seen)


def test_encoders_are_timed_on_random_rows_where_there_are_none(monkeypatch, tmp_path):
    """Of a repository that is read remotely, and of files that have their headers alone."""
    monkeypatch.setattr(timing, "encode_speed", lambda kind, threads, **_: 1000.0 * threads)
    for tensors in (Tensors(X, files=(tmp_path / "remote",)), Tensors(np.zeros_like(X))):
        assert timing.predict_seconds(tensors.plan(), 1)["q4_0"] == pytest.approx(X.size / 1000, rel=1e-4)
    assert timing.seconds_of_a_weight(planned("bf16", "q4_0")) is None


def test_timing_tells_nobody_of_weights_that_the_job_would_stop_at():
    x = X.copy()
    x[3, 5] = np.nan
    assert timing.predict_seconds(Tensors(x).plan(), 1)["q4_0"] > 0


def test_without_importance_of_its_own_a_weighted_tensor_is_timed_with_some(monkeypatch):
    output, seen = Tensors(X).plan().outputs[0], []
    produced = row_producer.encode
    monkeypatch.setattr(row_producer, "encode", lambda x, **given: seen.append(given["importance"]) or produced(x, **given))
    assert timing.seconds_of_a_weight(output, lacks_importance=True)
    assert all(one.shape == (512,) for one in seen)
