"""Predicted times: extrapolated from a sample; copied tensors are counted separately."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import timing


def planned(source_type, target):
    row_bytes = TYPES[target].row_bytes(256)
    return Output("a.weight", (256, 64), source_type, TYPES[target], "", lambda a, b: np.zeros((b - a, row_bytes), np.uint8))


def test_speed_is_elements_per_second_of_the_clock():
    ticks = iter(range(1000))
    speed = timing.encode_speed(TYPES["q8_0"], 1, lambda: float(next(ticks)))
    assert speed == timing.SAMPLE / 2  # started at 0; one call, long enough at 1; stopped at 2


def test_threads_share_the_work_and_copies_are_not_encoded(monkeypatch):
    monkeypatch.setattr(timing, "encode_speed", lambda tensor_type, threads: {"q8_0": 1000.0}[tensor_type.name] * threads)
    one = timing.predict_seconds(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 1)
    two = timing.predict_seconds(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 2)
    assert one == {"q8_0": pytest.approx(256 * 64 / 1000, rel=1e-4)}
    assert two["q8_0"] == pytest.approx(one["q8_0"] / 2)
    repacked = timing.predict_seconds(make_plan([planned("q4_0", "q4_0_r8")], {}, "out.gguf"), 1)
    assert list(repacked) == ["copy"]
    assert not timing.is_copied(planned("f8_e4m3", "q8_0"))
