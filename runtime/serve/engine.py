"""One thread that generates for many clients: a bounded queue of tasks and a slot with a session for each running task.

All tasks that need one more token share a pass through the model, which so reads each weight once for all of them. Long prompts
are read in parts between these passes, one task at a time. Sessions outlive their tasks, so that a prompt that begins like an
earlier one finds its beginning in the KV cache.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from ...data_classes import dataclass
from ...formats import MillError
from ...simd.compile.compile_time import seconds_without_compilation
from ..embedding import embed_tokens
from ..generation.generate import Generation, Timings, feed_pending, generate
from ..model import Model, Session
from .tasks import Counts, EndEvent, Event, PromptEvent, SlotState, Task, TextEvent


class Busy(MillError):
    """The queue is full, or the engine is closed."""


@dataclass(eq=False)
class _Request:
    """Tasks that were submitted together. turn: the engine's count of started tasks when one of them was last started, or when
    they came."""

    turn: int


@dataclass(eq=False)
class _Slot:
    """A session that is reused. last_used: number of the last task that used it, counted from 1; generation, options: of that
    task."""

    session: Session
    last_used: int = 0
    generation: Generation | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def state(self, is_processing: bool) -> SlotState:
        generation, n_tokens = self.generation, len(self.session.tokens)
        if generation is None:
            return SlotState(n_tokens, is_processing, self.last_used)
        limit = generation.n_predict
        remaining = limit if limit < 0 else limit - generation.timings.generated_tokens
        return SlotState(n_tokens, is_processing, self.last_used, self.options, generation.timings, remaining)


@dataclass(eq=False)
class _RunningTask:
    """A task with its slot.

    start      `seconds_without_compilation()` from which on time counts for its next pass
    n_reported number of elements of `generation.sampled` that were sent in events
    is_scored  the PromptEvent was sent, or is not wanted
    """

    task: Task
    slot: _Slot
    generation: Generation
    start: float
    n_reported: int = 0
    is_scored: bool = False


@dataclass(eq=False)
class _Computation:
    """Steps of work with the model, the results of those that were done, and the Future of all."""

    steps: Iterator[Any]
    done: Future[list[Any]] = field(default_factory=Future)
    results: list[Any] = field(default_factory=list)


class Engine:
    """Generates on a thread of its own, one pass for all running tasks at a time."""

    def __init__(self, model: Model, max_queue: int = 16, on_end: Callable[[EndEvent], None] | None = None):
        """max_queue: requests that may wait besides the settings.parallel running ones; on_end: called at the end of each
        task. `totals` are the timings of all tasks that have ended, `counts` what was done so far."""
        self.model, self.max_queue, self._on_end = model, max_queue, on_end
        self.n_slots = model.settings.parallel
        self._queue: queue.SimpleQueue[Task | _Computation | None] = queue.SimpleQueue()
        self._lock, self._open, self._requests = threading.Lock(), True, dict[Task, _Request]()
        # Used by the engine's thread only:
        self._waiting: deque[Task] = deque()
        self._running: list[_RunningTask] = []
        self._slots: list[_Slot] = []
        self._n_started = 0
        self._computations: deque[_Computation] = deque()
        self._n_computations = 0  # with those in the queue; under the lock
        self.totals, self.counts = Timings(), Counts()
        self._thread = threading.Thread(target=self._run, name="ggufmill-engine", daemon=True)
        self._thread.start()

    def use_slot(self, number: int, use: Callable[[Session], Any]) -> Iterator[Any]:
        """A computation (see `compute`): what a function makes of the session of slot `number`. Raises Busy while a task runs
        in it."""
        slot = self._numbered(number)
        if any(running.slot is slot for running in self._running):
            raise Busy(f"slot {number} is working on a request; try again later")
        yield use(slot.session)

    def _numbered(self, number: int) -> _Slot:
        while len(self._slots) <= number:
            self._slots.append(_Slot(self.model.session()))
        return self._slots[number]

    def _wanted(self, task: Task) -> _Slot | None:
        """The slot that a task waits for."""
        return self._numbered(task.slot) if 0 <= task.slot < self.n_slots else None

    def slots(self) -> list[SlotState]:
        """The state of each slot."""
        in_use = [running.slot for running in list(self._running)]
        slots = [slot.state(slot in in_use) for slot in list(self._slots)]
        return slots + [SlotState()] * (self.n_slots - len(slots))

    @property
    def n_tasks(self) -> int:
        """Number of tasks that run or wait."""
        return len(self._requests)

    def submit(self, *tasks: Task) -> None:
        """Queues the tasks of a request. Raises Busy if too many requests wait already, or after `close`."""
        with self._lock:
            if not self._open:
                raise Busy("the server is shutting down")
            n_requests = len(set(self._requests.values()))
            if n_requests >= self.n_slots + self.max_queue:
                raise Busy(f"{n_requests} requests are being worked on or wait already; try again later")
            self._requests |= dict.fromkeys(tasks, _Request(self._n_started))
        for task in tasks:
            self._queue.put(task)

    def compute(self, steps: Iterator[Any]) -> Future[list[Any]]:
        """The results of steps of work with the model, which the engine's thread does, one between two passes, until the Future
        is cancelled. Raises Busy as `submit`; the Future has the exception of a step."""
        computation = _Computation(steps)
        with self._lock:
            if not self._open:
                raise Busy("the server is shutting down")
            if self._n_computations >= self.n_slots + self.max_queue:
                raise Busy(f"{self._n_computations} requests wait already; try again later")
            self._n_computations += 1
        self._queue.put(computation)
        return computation.done

    def warm_up(self) -> None:
        """Queues a short prompt, and a token of two sequences side by side if there may be such, so that kernels are compiled
        and weights in memory before the first request. Does not wait."""
        tokenizer = self.model.tokenizer
        first = tokenizer.bos if tokenizer.bos is not None else 0
        prompt = [first] * min(32, self.model.n_ctx - 2)
        if not self.model.has_head:
            self.compute(embed_tokens(self.model, [prompt], "last"))
            return
        options = {"n_predict": 2, "temp": 0, "ignore_eos": True}
        self.submit(Task(prompt, options, lambda event: None, reported=False))
        if self.n_slots > 1:
            pair = [(self.model.session(2), [first]) for _ in range(2)]
            self.compute(map(self.model.feed, [pair], [True]))

    def stop(self) -> None:
        """Ends all tasks and accepts no more; returns at once, so that a signal handler may call it."""
        self._open = False
        self._queue.put(None)

    def close(self, timeout: float | None = 10) -> None:
        """As `stop`, and waits for the thread. timeout: seconds that the pass under way may take."""
        self.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        while self._open or self._requests or self._n_computations:
            self._receive_tasks(block=self._open and not self._running and not self._waiting and not self._computations)
            for running in [r for r in self._running if r.task.cancelled or not self._open]:
                self._send_events(running, running.generation.finish_cancelled())
            while len(self._running) < self.n_slots and (task := self._next_task()) is not None:
                self._waiting.remove(task)
                self._start(task)
            self._step()
            self._compute()

    def _compute(self) -> None:
        """One step of one computation."""
        if not self._computations:
            return
        computation = self._computations.popleft()
        try:
            if not self._open:
                raise Busy("the server is shutting down")
            if not computation.done.cancelled():
                computation.results.append(next(computation.steps))
                self._computations.append(computation)
                return
        except StopIteration:
            _set(computation.done.set_result, computation.results)
        except Exception as error:
            _set(computation.done.set_exception, error)
        with self._lock:
            self._n_computations -= 1

    def _receive_tasks(self, block: bool) -> None:
        """Moves tasks from the queue to `_waiting` and ends the cancelled ones. block: wait until there is at least one."""
        while block or not self._queue.empty():
            task, block = self._queue.get(), False
            if isinstance(task, _Computation):
                self._computations.append(task)
            elif task is not None:
                self._waiting.append(task)
        ended = {task for task in self._waiting if task.cancelled or not self._open}
        if ended:
            self._waiting = deque(task for task in self._waiting if task not in ended)
        for task in ended:
            self._end(task, EndEvent("cancelled"))

    def _next_task(self) -> Task | None:
        """The waiting task whose request has had its turn longest ago; None if there is none. Tasks with a prompt that is being
        read, or that name a slot with a task, wait for it."""
        reading = {id(running.task.prompt) for running in self._running if running.generation.is_reading}
        in_use = [running.slot for running in self._running]
        ready = (task for task in self._waiting if id(task.prompt) not in reading and self._wanted(task) not in in_use)
        return min(ready, key=lambda task: self._requests[task].turn, default=None)

    def _start(self, task: Task) -> None:
        start = seconds_without_compilation()
        self._n_started += 1
        self._requests[task].turn = self._n_started
        try:
            slot = self._slot_for(task)
            generation = generate(self.model, task.prompt, session=slot.session, **task.options)
        except Exception as error:
            self._end(task, EndEvent(error=error))
            return
        slot.generation, slot.options = generation, task.options
        self._running.append(_RunningTask(task, slot, generation, start, is_scored=not generation.score_prompt))

    def _slot_for(self, task: Task) -> _Slot:
        """The free slot whose session has most of the prompt, of equals the one least recently used; a new slot if no session
        has more than one of its tokens and there are less than n_slots. If a running task's session has more of the prompt than
        any that is free, the slot gets a copy of that. Prompts that are scored are read again. A task that names a slot gets
        it as it is."""
        prompt = [] if task.options.get("score_prompt") else task.prompt
        cached = {slot: slot.session.resumable(slot.session.shared(prompt)) for slot in self._slots}
        in_use = [running.slot for running in self._running]
        free = [slot for slot in self._slots if slot not in in_use]
        if (wanted := self._wanted(task)) is not None:
            wanted.last_used = self._n_started
            return wanted
        slot = max(free, key=lambda each: (cached[each], -each.last_used), default=None)
        source = max(in_use, key=lambda each: cached[each], default=None)
        n_cached = max(cached[slot] if slot is not None else 0, 1)
        is_copied = source is not None and cached[source] > n_cached
        if slot is None or (len(self._slots) < self.n_slots and (is_copied or n_cached < 2)):
            slot = _Slot(self.model.session())
            self._slots.append(slot)
        elif is_copied:
            slot = min(free, key=lambda each: each.last_used)
        if source is not None and is_copied:
            slot.session = source.session.fork(cached[source])
        slot.last_used = self._n_started
        return slot

    def _step(self) -> None:
        """One token for each task that has read its prompt, and a part of one prompt."""
        tasks = list(self._running)
        batch: list[_RunningTask] = []
        size, limit = 0, self.model.decode_batch
        for running in [each for each in tasks if not each.generation.is_reading]:
            count = len(running.generation.pending_tokens) + running.slot.session.uncomputed
            if batch and size + count > limit:
                self._feed(batch)
                batch, size = [], 0
            batch.append(running)
            size += count
        if batch:
            self._feed(batch)
        reading = next((each for each in tasks if each.generation.is_reading), None)
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
        self.counts.passes += 1
        self.counts.busy_slots += len(self._running)
        self.counts.longest = max(self.counts.longest, *(len(running.slot.session.tokens) for running in batch))
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
        generation, sampled, number = running.generation, [], self._slots.index(running.slot)
        if not running.is_scored and len(running.slot.session.tokens) >= len(generation.prompt):
            running.is_scored = True
            _notify(running.task, PromptEvent(generation.prompt_scores))
        if text or not generation.pending_tokens:
            sampled = generation.sampled[running.n_reported :]
            running.n_reported += len(sampled)
        if text:
            _notify(running.task, TextEvent(text, sampled, number))
            sampled = []
        if not generation.pending_tokens:
            self._running.remove(running)
            generation.sampled, generation.prompt_scores = [], []  # the slot keeps the rest
            self._end(
                running.task,
                EndEvent(generation.reason, sampled, generation.ending, generation.timings, None, generation.stop_text, number),
            )

    def _fail(self, running: _RunningTask, error: Exception) -> None:
        self._running.remove(running)
        self._slots.remove(running.slot)  # the state of its session is unknown
        self._end(running.task, EndEvent(error=error))

    def _end(self, task: Task, end: EndEvent) -> None:
        with self._lock:
            del self._requests[task]
            for name, value in vars(end.timings).items():
                setattr(self.totals, name, getattr(self.totals, name) + value)
        _notify(task, end)
        if self._on_end is not None and task.reported:
            self._on_end(replace(end, origin=task.origin))


def _set(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    """Sets the outcome of a Future, unless it was cancelled meanwhile."""
    with suppress(InvalidStateError):
        set_outcome(outcome)


def _notify(task: Task, event: Event) -> None:
    """Calls the task's listener; one that has gone (its event loop is closed) cancels the task and does not end the engine."""
    try:
        task.notify(event)
    except RuntimeError:
        task.cancel()
