"""What a terminal shows while nothing is reported: the time that has passed, of the bar or of what has none."""

import io
import time

from ggufmill.cli.display import console
from ggufmill.pipeline.common.progress import Progress, Stage


class Terminal(io.StringIO):
    def isatty(self):
        return True


def begin(monkeypatch):
    """Called within a test, since pytest sets sys.stderr before it."""
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(console, "_EVERY", 0.01)
    return made


def wait_for(terminal, *texts):
    until = time.monotonic() + 20
    while not all(text in terminal.getvalue() for text in texts):
        assert time.monotonic() < until, terminal.getvalue()
        time.sleep(0.01)


def test_before_the_first_stage_and_between_stages_seconds_are_counted(monkeypatch):
    terminal = begin(monkeypatch)
    with console.progress_bars() as bars:
        wait_for(terminal, "working: 0 s")
        Stage(bars, "copy", 1).advance()
        bars.close()
        terminal.seek(terminal.truncate(0))
        wait_for(terminal, "working: ")


def test_a_bar_that_stands_still_is_drawn_again(monkeypatch):
    terminal = begin(monkeypatch)
    with console.progress_bars() as bars:
        Stage(bars, "copy", 10)
        terminal.seek(terminal.truncate(0))
        wait_for(terminal, "copy:   0%")


def test_a_bar_that_may_be_short_is_drawn_late(monkeypatch):
    terminal = begin(monkeypatch)
    monkeypatch.setattr(console, "_DELAYS", {"checksum": 1000.0, "copy": 0.0})
    with console.progress_bars() as bars:
        Stage(bars, "checksum", 10).advance(10)
        Stage(bars, "copy", 10).advance(10)
    assert "checksum" not in terminal.getvalue()
    assert "copy: 100%" in terminal.getvalue()


def test_what_is_written_stands_above_the_bars(monkeypatch):
    terminal = begin(monkeypatch)
    with console.progress_bars() as bars:
        bars(Progress("copy", 0, 10, "B"))
        with console.above_bars():
            terminal.write("a note\n")
    lines = terminal.getvalue().replace("\r", "\n").split("\n")
    assert "a note" in lines
