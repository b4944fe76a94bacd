"""Progress of a call: what is reported, and to whom.

Every function of the library that takes a while has a keyword argument `progress`:

    None      a bar in a notebook, nothing anywhere else
    True      a bar of tqdm.auto, which draws itself in a notebook as well as in a terminal
    False     nothing
    callable  called with a `Progress` again and again, by one thread at a time
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...simd.compile.compile_time import compilation_heard, compilation_seconds, seconds_without_compilation
from .messages import printable

if TYPE_CHECKING:
    from ...runtime import Model

BYTES, WINDOWS = "B", "chunk"  # units
COMPILE = "compile"  # a stage


@dataclass(frozen=True)
class Progress:
    """How far a call has come in one of its stages, which follow each other.

    stage    what is being done: 'quantize', 'verify', 'checksums', 'perplexity', ...; and 'compile', within any other, while
             kernels are compiled, which is needed once: `item` says for what, such as a type, `done` counts these reports
    done     units that are finished; within a stage it never falls
    total    units in all; None while that is not known
    unit     'B' for bytes, 'tensor', 'chunk' (a window of a text), 'group', 'test', 'depth'
    item     what was finished last, such as a tensor's name; '' if there is nothing to name
    partial  the result so far, of functions that say so
    remaining  seconds that this stage is expected to take yet; None: as the units so far suggest
    share    of the units that are being computed, how many are done: those of a pass through a model, layer by layer
    """

    stage: str
    done: int
    total: int | None
    unit: str
    item: str = ""
    partial: Any = None
    share: float = 0.0
    remaining: float | None = None


OnProgress = Callable[[Progress], None]


class Stage:
    """One stage of a call: reports 0 when it is made, and after that every advance.

    Example:
        >>> reports = []
        >>> stage = Stage(reports.append, "verify", 10, "tensor")
        >>> stage.advance(3, "token_embd.weight")
        >>> [(report.done, report.total, report.item) for report in reports]
        [(0, 10, ''), (3, 10, 'token_embd.weight')]
    """

    estimate: Callable[[int, str], float | None] | None = None  # (units of an advance, item) -> `Progress.remaining`
    time_share: Callable[[float], float] | None = None  # units -> share of the stage's time, where units differ in theirs

    def __init__(self, report: OnProgress, name: str, total: int | None = None, unit: str = BYTES):
        self._report, self.name, self.total, self.unit, self.done = report, name, total, unit, 0
        self._began, self._first = seconds_without_compilation(), 0.0
        report(Progress(name, 0, total, unit))

    def advance(self, count: int = 1, item: str = "", partial: Any = None) -> None:
        """Reports that `count` units more are finished; of 0 units what is done now, and nothing if there is nothing to say."""
        if count == 0 and partial is None:
            if item:
                self.within(0.0, item)
            return
        self.done += count
        remaining = self.estimate(count, item) if self.estimate is not None else self._remaining(self.done)
        self._report(Progress(self.name, self.done, self.total, self.unit, item, partial, remaining=remaining))

    def within(self, share: float, item: str = "") -> None:
        """Reports that so many units, a fraction, are done of those that are being computed. item: what is done now."""
        remaining = self._remaining(self.done + share)
        self._report(Progress(self.name, self.done, self.total, self.unit, item, share=share, remaining=remaining))

    def time_from(self, units: int) -> None:
        """The remaining time follows from how fast `time_share` grows from these units on."""
        self._began, self._first = seconds_without_compilation(), self.time_share(units) if self.time_share is not None else 0.0

    def _remaining(self, units: float) -> float | None:
        share = self.time_share(units) if self.time_share is not None else 0.0
        if share <= self._first:
            return None
        return (seconds_without_compilation() - self._began) * (1 - share) / (share - self._first)

    @contextmanager
    def watching(self, *models: Model, windows: int = 1) -> Iterator[None]:
        """Within this, passes are reported layer by layer. models: which compute each unit, of so many windows, one after the
        other."""
        shares, reached = [0.0] * len(models), [self.done]

        def report(number: int, computed: float) -> None:
            if self.done != reached[0]:
                reached[0], shares[:] = self.done, [0.0] * len(models)
            shares[number] = computed
            self.within(sum(shares) / len(models) / windows)

        for number, model in enumerate(models):
            model.on_windows = partial(report, number)
        try:
            yield
        finally:
            for model in models:
                model.on_windows = None

    def reach(self, done: int, total: int | None = None, item: str = "", partial: Any = None) -> None:
        """Reports that `done` units are finished, of `total` if that is known now."""
        self.total = self.total if total is None else total
        self.advance(done - self.done, item, partial)

    def reach_share(self, done: float, total: int | None = None) -> None:
        """As `reach`, of units of which the last is being computed."""
        self.reach(int(done), total)
        if done > self.done:
            self.within(done - self.done)


class Bars:
    """Draws reports as bars, one per stage; `close` ends the last one.

    make    makes a bar, taking the keyword arguments of tqdm
    delays  stage -> seconds before which it gets no bar, since it may be over by then
    """

    def __init__(self, make: Callable[..., Any], delays: Mapping[str, float] | None = None):
        self._make, self._delays, self._bar, self._stage = make, delays or {}, None, ""
        self._compiling = 0.0  # seconds that are not in the bar's times

    def __call__(self, progress: Progress) -> None:
        if progress.stage == COMPILE:
            return  # of which lines tell
        if (progress.done == 0 and not progress.share) or progress.stage != self._stage:
            self.close()
            self._stage, delay = progress.stage, self._delays.get(progress.stage, 0.0)
            scale = progress.unit == BYTES
            self._bar = self._make(
                total=progress.total, desc=progress.stage, unit=progress.unit, unit_scale=scale, miniters=0, delay=delay
            )
            self._compiling = compilation_seconds()
        if self._bar is not None:
            self.leave_out_compilation()
            self._bar.total = progress.total
            if progress.remaining is not None:
                left = str(timedelta(seconds=round(progress.remaining)))
                self._bar.bar_format = (
                    f"{{l_bar}}{{bar}}| {{n_fmt}}/{{total_fmt}} [{{elapsed}}<{left}, {{rate_fmt}}{{postfix}}]"
                )
            if progress.item:
                self._bar.set_postfix_str(printable(progress.item), refresh=False)
            done = progress.done + round(progress.share, 2) if progress.share else progress.done
            self._bar.n = max(done, self._bar.n)  # windows of a pass are counted when they are scored, too
            self._bar.update(0)

    def refresh(self) -> bool:
        """Draws the bar anew, with the time that has passed; False if there is none, or not yet."""
        bar = self._bar
        if bar is None or bar.disable or time.time() < bar.start_t + bar.delay:
            return False
        self.leave_out_compilation()
        bar.refresh()
        return True

    def leave_out_compilation(self) -> None:
        """Takes the time for compiling kernels, which is needed once, out of the bar's rate and remaining time."""
        before, self._compiling = self._compiling, compilation_seconds()
        if self._bar is not None and not self._bar.disable:  # one that is not drawn (--quiet) has no times
            self._bar.start_t += self._compiling - before
            self._bar.last_print_t += self._compiling - before

    def close(self) -> None:
        """Ends the bar that is drawn now. One that never moved is wiped: as a rule the message of an error follows it."""
        if self._bar is not None:
            self._bar.leave = self._bar.n > 0
            self._bar.close()
        self._bar, self._stage = None, ""


@contextmanager
def reporting(progress: OnProgress | bool | None) -> Iterator[OnProgress]:
    """The argument `progress` of a function as what `Stage` takes; bars end with the context."""
    if callable(progress):
        yield progress
        return
    if not (_in_notebook() if progress is None else progress):
        yield lambda report: None
        return
    from tqdm.auto import tqdm

    bars = Bars(tqdm)
    try:
        yield bars
    finally:
        bars.close()


@contextmanager
def hearing_of_kernels(progress: OnProgress | bool | None) -> Iterator[OnProgress | bool | None]:
    """The argument `progress` of a function: a callable also gets reports of the stage COMPILE within this, and is never called
    by two threads at a time. Bars have lines about that."""
    if not callable(progress) or isinstance(progress, Bars | _Told):
        yield progress
        return
    told = _Told(progress)
    with compilation_heard(told.compiling):
        yield told


class _Told:
    """What reports of any thread are told to, one at a time."""

    def __init__(self, told: OnProgress):
        self._told, self._lock, self._times = told, threading.RLock(), 0

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            self._told(progress)

    def compiling(self, subject: str) -> None:
        """Says what kernels are compiled for; nothing while another report is told, which may itself wait for the compiler."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._times += 1
            self._told(Progress(COMPILE, self._times, None, "report", subject))
        finally:
            self._lock.release()


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "zmqshell" in type(shell).__module__
