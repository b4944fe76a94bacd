"""One thread that generates for many clients: a bounded queue of tasks and a slot with a session for each running task.

All tasks that need one more token share a pass through the model, which so reads each weight once for all of them. Long prompts
are read in parts between these passes, one task at a time. Sessions outlive their tasks, so that a prompt that begins like an
earlier one finds its beginning in the KV cache.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...formats import MillError, PlanError
from ..evaluate.clock import seconds_without_compilation
from ..generation.generate import Generation, Timings, common_prefix, feed_pending, generate
from ..generation.sampling import SampledToken
from ..model import Model, Session


class Busy(MillError):
    """The queue is full, or the engine is closed."""


@dataclass(frozen=True)
class TextEvent:
    """A piece of an answer. sampled: the tokens since the last event, if their probabilities were asked for."""

    text: str
    sampled: list[SampledToken]


@dataclass(frozen=True)
class EndEvent:
    """The end of an answer. reason: that of the `Generation`; error: the exception that ended it, or None."""

    reason: str = ""
    sampled: list[SampledToken] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    error: Exception | None = None


@dataclass(eq=False)
class Task:
    """A prompt to be continued.

    options   keyword arguments of `generate`
    notify    called by the engine's thread with each TextEvent, then with the EndEvent
    reported  the engine calls its `on_end` for this task
    """

    prompt: list[int]
    options: dict[str, Any]
    notify: Callable[[TextEvent | EndEvent], None]
    reported: bool = True
    cancelled: bool = False

    def cancel(self) -> None:
        """Ends the task after the pass under way, or before it has started. May be called from any thread."""
        self.cancelled = True


@dataclass(eq=False)
class _Slot:
    """A session that is reused. last_used: number of the last task that used it, counted from 1."""

    session: Session
    last_used: int = 0


@dataclass(eq=False)
class _RunningTask:
    """A task with its slot.

    start      `seconds_without_compilation()` from which on time counts for its next pass
    n_reported number of elements of `generation.sampled` that were sent in events
    """

    task: Task
    slot: _Slot
    generation: Generation
    start: float
    n_reported: int = 0


class Engine:
    """Generates on a thread of its own, one pass for all running tasks at a time."""

    def __init__(self, model: Model, max_queue: int = 16, on_end: Callable[[EndEvent], None] | None = None):
        """max_queue: tasks that may wait besides the settings.parallel running ones; on_end: called at the end of each task."""
        self.model, self.max_queue, self._on_end = model, max_queue, on_end
        self.n_slots = model.settings.parallel
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock, self._open, self._task_ids = threading.Lock(), True, set[int]()
        # Used by the engine's thread only:
        self._waiting: deque[Task] = deque()
        self._running: list[_RunningTask] = []
        self._slots: list[_Slot] = []
        self._n_started = 0
        self._thread = threading.Thread(target=self._run, name="ggufmill-engine", daemon=True)
        self._thread.start()

    @property
    def n_tasks(self) -> int:
        """Number of tasks that run or wait."""
        return len(self._task_ids)

    def submit(self, task: Task) -> None:
        """Queues a task. Raises Busy if too many wait already, or after `close`."""
        with self._lock:
            if not self._open:
                raise Busy("the server is shutting down")
            if len(self._task_ids) >= self.n_slots + self.max_queue:
                raise Busy(f"{len(self._task_ids)} requests are being worked on or wait already; try again later")
            self._task_ids.add(id(task))
        self._queue.put(task)

    def warm_up(self) -> None:
        """Queues a short prompt, so that kernels are compiled and weights in memory before the first request. Does not wait."""
        tokenizer = self.model.tokenizer
        first = tokenizer.bos if tokenizer.bos is not None else 0
        prompt = [first] * min(32, self.model.n_ctx - 2)
        options = {"n_predict": 2, "temp": 0, "ignore_eos": True}
        self.submit(Task(prompt, options, lambda event: None, reported=False))

    def stop(self) -> None:
        """Ends all tasks and accepts no more; returns at once, so that a signal handler may call it."""
        self._open = False
        self._queue.put(None)

    def close(self, timeout: float | None = 10) -> None:
        """As `stop`, and waits for the thread. timeout: seconds that the pass under way may take."""
        self.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        while self._open or self._task_ids:
            self._receive_tasks(block=not self._running and not self._waiting)
            for running in [r for r in self._running if r.task.cancelled or not self._open]:
                self._send_events(running, running.generation.finish_cancelled())
            while self._waiting and len(self._running) < self.n_slots:
                self._start(self._waiting.popleft())
            self._step()

    def _receive_tasks(self, block: bool) -> None:
        """Moves tasks from the queue to `_waiting` and ends the cancelled ones. block: wait until there is at least one."""
        while block or not self._queue.empty():
            task, block = self._queue.get(), False
            if task is not None:
                self._waiting.append(task)
        for task in [task for task in self._waiting if task.cancelled or not self._open]:
            self._waiting.remove(task)
            self._end(task, EndEvent("cancelled"))

    def _start(self, task: Task) -> None:
        start, slot = seconds_without_compilation(), self._slot_for(task.prompt)
        try:
            generation = generate(self.model, task.prompt, session=slot.session, **task.options)
        except Exception as error:
            self._end(task, EndEvent(error=error))
            return
        self._running.append(_RunningTask(task, slot, generation, start))

    def _slot_for(self, prompt: list[int]) -> _Slot:
        """The free slot whose session has most of the prompt, of equals the one least recently used; a new slot if no session
        has more than one of its tokens and there are less than n_slots."""
        in_use = [running.slot for running in self._running]
        free = [slot for slot in self._slots if slot not in in_use]

        def n_cached(session: Session) -> int:
            return session.resumable(common_prefix(session.tokens, prompt))

        best = max(free, key=lambda s: (n_cached(s.session), -s.last_used), default=None)
        if best is None or (len(self._slots) < self.n_slots and n_cached(best.session) < 2):
            best = _Slot(self.model.session())
            self._slots.append(best)
        self._n_started += 1
        best.last_used = self._n_started
        return best

    def _step(self) -> None:
        """One token for each task that has read its prompt, and a part of one prompt."""
        pending = [(running, len(running.generation.pending_tokens)) for running in self._running]
        batch: list[_RunningTask] = []
        size, limit = 0, self.model.decode_batch  # up to this size a batch gives each sequence the same logits as alone
        for running, count in [(each, n) for each, n in pending if n == each.generation.n_logits]:
            count += running.slot.session.uncomputed
            if batch and size + count > limit:
                self._feed(batch)
                batch, size = [], 0
            batch.append(running)
            size += count
        if batch:
            self._feed(batch)
        reading = next((each for each, n in pending if n > each.generation.n_logits), None)
        if reading is not None:
            self._running.remove(reading)
            self._running.append(reading)  # the next part is that of another prompt
            self._feed([reading])

    def _feed(self, batch: list[_RunningTask]) -> None:
        """One pass for the pending tokens of some tasks."""
        try:
            logits = feed_pending(self.model, [running.generation for running in batch])
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            for running in batch:  # one by one, so that only the task at fault ends
                self._feed([running])
            return
        for running, rows in zip(batch, logits, strict=True):
            try:
                text = running.generation.advance(rows, running.start)
            except Exception as error:
                self._fail(running, error)
                continue
            running.start = seconds_without_compilation()
            self._send_events(running, text)

    def _send_events(self, running: _RunningTask, text: str) -> None:
        """Sends new text, if there is any, and the end of the task if its generation has ended."""
        generation, sampled = running.generation, []
        if text or not generation.pending_tokens:
            sampled = generation.sampled[running.n_reported :]
            running.n_reported += len(sampled)
        if text:
            _notify(running.task, TextEvent(text, sampled))
            sampled = []
        if not generation.pending_tokens:
            self._running.remove(running)
            self._end(running.task, EndEvent(generation.reason, sampled, generation.timings))

    def _fail(self, running: _RunningTask, error: Exception) -> None:
        self._running.remove(running)
        self._slots.remove(running.slot)  # the state of its session is unknown
        self._end(running.task, EndEvent(error=error))

    def _end(self, task: Task, end: EndEvent) -> None:
        with self._lock:
            self._task_ids.discard(id(task))
        _notify(task, end)
        if self._on_end is not None and task.reported:
            self._on_end(end)


def _notify(task: Task, event: TextEvent | EndEvent) -> None:
    """Calls the task's listener; one that has gone (its event loop is closed) cancels the task and does not end the engine."""
    try:
        task.notify(event)
    except RuntimeError:
        task.cancel()


def check_prompt_length(model: Model, prompt: list[int]) -> None:
    """Raises PlanError for a prompt that is empty or leaves no token of the context for an answer."""
    if not prompt:
        raise PlanError("the prompt is empty, and the model has no token to begin a text with")
    if len(prompt) >= model.n_ctx:
        raise PlanError(f"the prompt has {len(prompt)} tokens, and the context holds {model.n_ctx} with the answer")
