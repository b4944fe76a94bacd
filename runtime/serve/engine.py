"""One thread that generates for many: a bounded queue, sessions that are kept so that what repeats is not computed again.

Whatever asks for one token goes through the model together, so that a step reads each weight once for all. Long prompts are
read a piece at a time, in turn, between these steps.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...formats import MillError, PlanError
from ..evaluate.clock import working_seconds
from ..generation.generate import Generation, Timings, common_prefix, generate
from ..generation.sampling import Drawn
from ..model import Model, Session


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


@dataclass(eq=False)
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

    def cancel(self) -> None:
        """Ends it as soon as the step under way is done, or before it began. From any thread."""
        self.cancelled = True


@dataclass(eq=False)
class _Slot:
    """A session that is kept. used: a count that grows, to tell the one that was idle longest."""

    session: Session
    used: int = 0


@dataclass(eq=False)
class _Running:
    """A job at work. since: `working_seconds()` from which on time counts for its next step; sent: of what was drawn."""

    job: Job
    slot: _Slot
    generation: Generation
    since: float
    sent: int = 0


class Engine:
    """Generates on a thread of its own, a step of all running jobs at a time."""

    def __init__(self, model: Model, waiting: int = 16, on_end: Callable[[End], None] | None = None):
        """waiting: jobs that may queue up behind the `settings.parallel` running ones; on_end: told of each job that ends."""
        self.model, self.waiting, self._on_end = model, waiting, on_end
        self.slots = model.settings.parallel
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock, self._open, self._jobs = threading.Lock(), True, set[int]()
        self._waiting: deque[Job] = deque()  # this and what follows is the thread's own
        self._running: list[_Running] = []
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
            self._fetch(block=not self._running and not self._waiting)
            for running in [r for r in self._running if r.job.cancelled or not self._open]:
                self._tell(running, running.generation.cancelled())
            while self._waiting and len(self._running) < self.slots:
                self._begin(self._waiting.popleft())
            self._step()

    def _fetch(self, block: bool) -> None:
        """Takes over what came into the queue, and ends what waits and is not wanted any more. block: waits for something."""
        while block or not self._queue.empty():
            job, block = self._queue.get(), False
            if job is not None:
                self._waiting.append(job)
        for job in [job for job in self._waiting if job.cancelled or not self._open]:
            self._waiting.remove(job)
            self._end(job, End("cancelled"))

    def _begin(self, job: Job) -> None:
        began, slot = working_seconds(), self._slot_for(job.prompt)
        try:
            generation = generate(self.model, job.prompt, session=slot.session, **job.options)
        except Exception as error:
            self._end(job, End(error=error))
            return
        self._running.append(_Running(job, slot, generation, began))

    def _slot_for(self, prompt: list[int]) -> _Slot:
        """The free session that shares most with the prompt; a new one if none shares anything and there may be more."""
        taken = [running.slot for running in self._running]
        free = [slot for slot in self._slots if slot not in taken]
        best = max(free, key=lambda s: (common_prefix(s.session.tokens, prompt), -s.used), default=None)
        if best is None or (len(self._slots) < self.slots and common_prefix(best.session.tokens, prompt) < 2):
            best = _Slot(self.model.session())
            self._slots.append(best)
        self._count += 1
        best.used = self._count
        return best

    def _step(self) -> None:
        """A token for each job that has read its prompt, and a piece of one prompt."""
        single = [running for running in self._running if len(running.generation.wanted) == 1]
        batch = self.model.decode_batch  # what else runs beside a request changes none of its tokens
        for first in range(0, len(single), batch):
            self._feed(single[first : first + batch])
        reading = next((running for running in self._running if len(running.generation.wanted) > 1), None)
        if reading is not None:
            self._running.remove(reading)
            self._running.append(reading)  # the others' turn
            self._feed([reading])

    def _feed(self, together: list[_Running]) -> None:
        try:
            logits = self.model.feed([(running.slot.session, running.generation.wanted) for running in together])
        except Exception as error:
            if len(together) == 1:
                self._fail(together[0], error)
                return
            for running in together:  # that only those end whose fault it is
                self._feed([running])
            return
        for running, row in zip(together, logits, strict=True):
            try:
                text = running.generation.take(row, running.since)
            except Exception as error:
                self._fail(running, error)
                continue
            running.since = working_seconds()
            self._tell(running, text)

    def _tell(self, running: _Running, text: str) -> None:
        """Hands on what is new of a job: text, its end, or nothing yet."""
        generation, drawn = running.generation, []
        if text or not generation.wanted:
            drawn = generation.drawn[running.sent :]
            running.sent += len(drawn)
        if text:
            _notify(running.job, Text(text, drawn))
            drawn = []
        if not generation.wanted:
            self._running.remove(running)
            self._end(running.job, End(generation.reason, drawn, generation.timings))

    def _fail(self, running: _Running, error: Exception) -> None:
        self._running.remove(running)
        self._slots.remove(running.slot)  # whatever state its session is in
        self._end(running.job, End(error=error))

    def _end(self, job: Job, end: End) -> None:
        with self._lock:
            self._jobs.discard(id(job))
        _notify(job, end)
        if self._on_end is not None and job.counts:
            self._on_end(end)


def _notify(job: Job, event: Text | End) -> None:
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
