"""Predicted times: extrapolated from a sample; copied tensors are counted separately."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import decode, encode, timing


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
