"""Predicted times: from a sample, and none for what is copied."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.jobs.plan import Output, make_plan
from ggufmill.quantize import timing


def planned(source_type, kind):
    rows = TYPES[kind].row_bytes(256)
    return Output("a.weight", (256, 64), source_type, TYPES[kind], "", lambda a, b: np.zeros((b - a, rows), np.uint8))


def test_speed_is_elements_over_time_on_the_clock():
    ticks = iter(range(1000))
    speed = timing.elements_per_second(TYPES["q8_0"], 1, lambda: float(next(ticks)))
    assert speed == timing.SAMPLE / 2  # begun at 0, one run, enough at 1, read at 2


def test_work_is_shared_by_threads_and_copies_are_not_encoding(monkeypatch):
    monkeypatch.setattr(timing, "elements_per_second", lambda kind, threads: {"q8_0": 1000.0}[kind.name] * threads)
    one = timing.predict(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 1)
    two = timing.predict(make_plan([planned("f32", "q8_0")], {}, "out.gguf"), 2)
    assert one == {"q8_0": 256 * 64 / 1000}
    assert two["q8_0"] == pytest.approx(one["q8_0"] / 2)
    moved = timing.predict(make_plan([planned("q4_0", "q4_0_r8")], {}, "out.gguf"), 1)
    assert list(moved) == ["copy"]
    assert not timing.copied(planned("f8_e4m3", "q8_0"))
