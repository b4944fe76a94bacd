"""What a bar says of the time that is left, where types are not equally fast."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, TensorSource
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.pipeline.common.progress import Bars, Stage
from ggufmill.pipeline.writing import carry_out, forecast
from ggufmill.quantize import timing


def test_it_is_the_time_of_the_types_that_are_left(monkeypatch):
    """q8_0 first, a hundred times as fast as iq4_k: after all of it the job has hardly begun, whatever its bytes say; a machine
    half as fast takes twice as long."""
    speeds = {"q8_0": 1e6, "iq4_k": 1e4}
    monkeypatch.setattr(timing, "encode_speed", lambda kind, threads, **_: speeds[kind.name] * threads)
    monkeypatch.setattr(timing, "REST", 0.0)

    def output(name, kind):
        return Output(name, (256, 64), "f32", TYPES[kind], "", lambda start, stop: np.zeros((stop - start, 0), np.uint8))

    plan = make_plan([output("a", "q8_0"), output("b", "iq4_k")], {}, "out.gguf")
    now = [0.0]
    left = carry_out.Remaining(plan, 1, lambda: now[0])
    weights, (first, second) = 256 * 64, (TYPES[kind].nbytes((256, 64)) for kind in ("q8_0", "iq4_k"))
    assert abs(left(first, "a") - weights / 1e4) < 1e-6
    now[0] = 2 * weights * (1 / 1e6 + 0.5 / 1e4)
    monkeypatch.setattr(carry_out, "_LEAST_SECONDS", 0.0)
    assert abs(left(second // 2, "b") - 2 * 0.5 * weights / 1e4) < 0.01
    assert left(second, "b") == 0


def test_what_timing_takes_is_a_part_of_the_job_that_is_timed(monkeypatch):
    """With covariances it took 1.3 s (gpt-oss, attention); a small job is not timed before it writes."""
    moments = iter([10.0, 20.0, 23.0])
    monkeypatch.setattr(forecast.time, "process_time", lambda: next(moments))
    monkeypatch.setattr(forecast, "compilation_seconds", lambda: 0.0)
    monkeypatch.setattr(forecast, "interpreting", lambda: 1.0)
    outputs = [
        Output(name, (256, 64), "f32", TYPES[name], "", lambda start, stop: np.zeros((stop - start, 0), np.uint8))
        for name in ("q8_0", "iq4_k")
    ]
    plan, source = make_plan(outputs, {}, "out.gguf"), TensorSource("", {}, {}, "")
    small = forecast.forecast(plan, source, timing=lambda plan, threads: {}, threads=2).seconds
    monkeypatch.setattr(forecast, "_TIMED_BYTES", 0)
    timed = forecast.forecast(plan, source, timing=lambda plan, threads: {}, threads=2).seconds
    assert timed["start"] - small["start"] == pytest.approx(3.0 / 2)


def test_a_bar_shows_it():
    made = []

    class Bar:
        n, disable, total, start_t, last_print_t, bar_format = 0, True, 0, 0.0, 0.0, None

        def __init__(self, **options):
            made.append(self)

        def set_postfix_str(self, text, refresh):
            pass

        def update(self, count):
            self.n += count

    stage = Stage(Bars(Bar), "quantize", 100)
    stage.estimate = lambda nbytes, name: 75.4
    stage.advance(10, "a")
    assert "<0:01:15," in made[0].bar_format
