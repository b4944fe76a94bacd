"""One thread that generates for many: a bounded queue, sessions that are kept so that what repeats is not computed again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...formats import MillError, PlanError
from ..generate import Generation, Timings, common_prefix, generate
from ..model import Model, Session
from ..sampling import Drawn


class Busy(MillError):
    """The queue is full, or the engine is closed."""


@dataclass(frozen=True)
class Text:
    """A piece of an answer. drawn: the tokens that were drawn since the last one, if their probabilities were asked for."""

    text: str
    drawn: list[Drawn]


@dataclass(frozen=True)
class End:
    """The end of an answer. reason: as in `Generation`; error: what went wrong, else None."""

    reason: str = ""
    drawn: list[Drawn] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    error: Exception | None = None


@dataclass
class Job:
    """Something to be generated.

    options: those of `generate`; notify: called with each Text and then the End, by the engine's thread; counts: whether the
    engine's own listener is told of its end.
    """

    prompt: list[int]
    options: dict[str, Any]
    notify: Callable[[Text | End], None]
    counts: bool = True
    cancelled: bool = False
    running: Generation | None = None

    def cancel(self) -> None:
        """Ends it as soon as the step under way is done, or before it began. From any thread."""
        self.cancelled = True
        if self.running is not None:
            self.running.cancel()


@dataclass
class _Slot:
    """A session and who uses it. used: a count that grows, to tell the one that was idle longest."""

    session: Session
    job: Job | None = None
    pieces: Iterator[str] = field(default_factory=lambda: iter(()))
    used: int = 0
    sent: int = 0


class Engine:
    """Generates on a thread of its own, a piece for each running job in turn."""

    def __init__(self, model: Model, waiting: int = 16, on_end: Callable[[End], None] | None = None):
        """waiting: jobs that may queue up behind the `settings.parallel` running ones; on_end: told of each job that ends."""
        self.model, self.waiting, self._on_end = model, waiting, on_end
        self.slots = model.settings.parallel
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock, self._open, self._jobs = threading.Lock(), True, set[int]()
        self._slots: list[_Slot] = []
        self._count = 0
        self._thread = threading.Thread(target=self._work, name="ggufmill-engine", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Jobs that run or wait."""
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Takes a job on. Raises Busy if too many wait already, or after `close`."""
        with self._lock:
            if not self._open:
                raise Busy("the server is shutting down")
            if len(self._jobs) >= self.slots + self.waiting:
                raise Busy(f"{len(self._jobs)} requests are being worked on or wait already; try again later")
            self._jobs.add(id(job))
        self._queue.put(job)

    def warm_up(self) -> None:
        """Reads a short prompt and generates, so that what has to be compiled or read is ready. Returns at once."""
        tokenizer = self.model.tokenizer
        first = tokenizer.bos if tokenizer.bos is not None else 0
        prompt = [first] * min(32, self.model.n_ctx - 2)
        self.submit(Job(prompt, {"n_predict": 2, "temp": 0, "ignore_eos": True}, lambda event: None, counts=False))

    def stop(self) -> None:
        """Ends all jobs and takes no more; returns at once, so that a signal handler may call it."""
        self._open = False
        self._queue.put(None)

    def close(self, timeout: float | None = 10) -> None:
        """The same, and waits for the thread. timeout: seconds that the step under way may take."""
        self.stop()
        self._thread.join(timeout)

    def _work(self) -> None:
        while self._open or self._jobs:
            running = [slot for slot in self._slots if slot.job is not None]
            if len(running) < self.slots:
                try:
                    job = self._queue.get(block=not running)
                except queue.Empty:
                    job = None
                if job is not None:
                    self._begin(job)
                    continue
            for slot in running:
                self._step(slot)
            if not self._open:
                self._drain()

    def _begin(self, job: Job) -> None:
        if job.cancelled or not self._open:
            self._end(job, End("cancelled"))
            return
        slot = self._slot_for(job.prompt)
        slot.job, slot.sent = job, 0
        try:
            job.running = generate(self.model, job.prompt, session=slot.session, **job.options)
        except Exception as error:
            slot.job = None
            self._end(job, End(error=error))
            return
        if job.cancelled:  # between the look above and now
            job.running.cancel()
        slot.pieces = iter(job.running)

    def _slot_for(self, prompt: list[int]) -> _Slot:
        """The free session that shares most with the prompt; a new one if none shares anything and there may be more."""
        free = [slot for slot in self._slots if slot.job is None]
        best = max(free, key=lambda s: (common_prefix(s.session.tokens, prompt), -s.used), default=None)
        if best is None or (len(self._slots) < self.slots and common_prefix(best.session.tokens, prompt) < 2):
            best = _Slot(self.model.session())
            self._slots.append(best)
        self._count += 1
        best.used = self._count
        return best

    def _step(self, slot: _Slot) -> None:
        job = slot.job
        assert job is not None
        assert job.running is not None
        if not self._open:
            job.running.cancel()
        try:
            text = next(slot.pieces, None)
        except Exception as error:
            self._slots.remove(slot)  # whatever state its session is in
            self._end(job, End(error=error))
            return
        drawn = job.running.drawn[slot.sent :]
        slot.sent += len(drawn)
        if text is not None:
            _tell(job, Text(text, drawn))
            return
        slot.job = None
        self._end(job, End(job.running.reason, drawn, job.running.timings))

    def _end(self, job: Job, end: End) -> None:
        with self._lock:
            self._jobs.discard(id(job))
        _tell(job, end)
        if self._on_end is not None and job.counts:
            self._on_end(end)

    def _drain(self) -> None:
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                self._end(job, End("cancelled"))


def _tell(job: Job, event: Text | End) -> None:
    """A listener that is gone must not end the engine."""
    try:
        job.notify(event)
    except RuntimeError:
        job.cancel()


def checked_length(model: Model, prompt: list[int]) -> None:
    """Raises PlanError for a prompt that is empty or leaves no room for an answer."""
    if not prompt:
        raise PlanError("the prompt is empty, and the model has no token to begin a text with")
    if len(prompt) >= model.n_ctx:
        raise PlanError(f"the prompt has {len(prompt)} tokens, and the context holds {model.n_ctx} with the answer")
