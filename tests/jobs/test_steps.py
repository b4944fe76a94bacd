"""Steps within a chunk: who hears of them, and how often."""

from threading import Thread

from ggufmill.jobs import steps
from ggufmill.jobs.steps import begin_step, hearing


def test_who_has_it_computed_hears_what_takes_long(monkeypatch):
    now, heard = [100.0], []
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    begin_step("before")
    with hearing(heard.append):
        for seconds, name in ((0.1, "a"), (0.5, "b"), (0.1, "c"), (0.6, "d")):
            now[0] += seconds
            begin_step(name)
        other = Thread(target=begin_step, args=("of another thread",))
        now[0] += 10
        other.start()
        other.join()
    now[0] += 10
    begin_step("after")
    assert heard == ["b", "d"]
