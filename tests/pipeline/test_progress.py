"""Progress: who gets reports, and what bars make of them."""

import io
import sys
import types
from typing import ClassVar

import pytest
from tqdm import tqdm

import ggufmill
from ggufmill.pipeline.common.progress import Bars, Progress, Stage, reporting
from ggufmill.recipes import FOLDER


class Bar:
    """Takes the place of a bar; `made` has all of them."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options, self.n, self.total, self.leave, self.item = options, 0, options["total"], True, ""
        self.start_t = self.last_print_t = 100.0
        self.disable = False
        Bar.made.append(self)

    def set_postfix_str(self, text, refresh):
        self.item = text

    def update(self, count):
        self.n += count

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


def test_a_bar_for_each_stage(made):
    bars = Bars(Bar, {"small": 100})
    stage = Stage(bars, "copy", 10)
    stage.advance(4, "a\x1b[31m")
    stage.advance(6)
    Stage(bars, "small", 99).advance(99)
    Stage(bars, "windows", unit="chunk").reach(3, 7)
    bars.close()
    assert [(bar.options["desc"], bar.n, bar.total) for bar in made] == [("copy", 10, 10), ("windows", 3, 7)]
    assert made[0].item == r"a\x1b[31m"
    assert (made[0].options["unit_scale"], made[1].options["unit_scale"]) == (True, False)
    assert all(bar.closed and bar.leave for bar in made)


def test_the_clock_of_a_bar_stands_still_while_kernels_are_compiled(made, monkeypatch):
    seconds = [7.0]
    monkeypatch.setattr("ggufmill.pipeline.common.progress.compilation_seconds", lambda: seconds[0])
    bars = Bars(Bar)
    stage = Stage(bars, "quantize", 10)
    stage.advance(1)
    assert (made[0].start_t, made[0].last_print_t) == (100.0, 100.0)
    seconds[0] += 40
    stage.advance(1)
    stage.advance(1)
    assert (made[0].start_t, made[0].last_print_t) == (140.0, 140.0)


def test_a_bar_that_never_moved_leaves_nothing(made):
    bars = Bars(Bar)
    Stage(bars, "copy", 10)
    bars.close()
    assert made[0].leave is False


def test_a_stage_that_comes_again_has_a_bar_of_its_own(made):
    bars = Bars(Bar)
    for total in (3, 5):
        Stage(bars, "checksum", total).advance(total)
    bars.close()
    assert [bar.n for bar in made] == [3, 5]


def reported(progress):
    with reporting(progress) as report:
        report(Progress("copy", 0, 1, "B"))
        report(Progress("copy", 1, 1, "B"))


def test_a_callable_gets_the_reports():
    reports = []
    reported(reports.append)
    assert [report.done for report in reports] == [0, 1]


def test_true_draws_bars_and_nothing_else_does(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: tqdm(file=stderr, **options))
    reported(None)
    reported(False)
    assert stderr.getvalue() == ""
    reported(True)
    assert "copy: 100%" in stderr.getvalue()


def test_a_notebook_has_bars_by_default(monkeypatch, made):
    shell = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    reported(None)
    reported(False)
    assert [bar.n for bar in made] == [1]


@pytest.mark.parametrize("verb", ["perplexity", "imatrix"])
def test_a_pass_is_reported_layer_by_layer(verb):
    """From the beginning with the number of windows; the first window runs with others, and is not done for a long time."""
    demo, reports = FOLDER / "demo", []
    function = ggufmill.perplexity if verb == "perplexity" else ggufmill.compute_imatrix
    function(demo, demo / "calibration.txt", chunks=2, progress=reports.append)
    reports = [report for report in reports if report.stage == verb]
    assert [report.total for report in reports] == [2] * len(reports)
    first = next(i for i, report in enumerate(reports) if report.done)
    shares = [report.share for report in reports[:first]]
    assert len(shares) == 5  # at the start, and after each of four layers
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[1]


def test_a_bar_never_falls(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    stage, seen = Stage(Bars(Bar), "perplexity", 3, "chunk"), []
    for share in (0.5, 2.0):
        stage.within(share)
        seen.append(Bar.made[0].n)
    for _ in range(3):
        stage.advance()
        seen.append(Bar.made[0].n)
    assert seen == [0.5, 2, 2, 2, 3]
    assert len(Bar.made) == 1
