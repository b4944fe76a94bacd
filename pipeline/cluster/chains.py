"""Steps that build on each other, on the workers of a cluster: all steps of a chain are done by one worker, which keeps what
they add up to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...errors import MillError
from .connection import Cluster, Watch
from .ordered_map import ATTEMPTS, POLL_SECONDS, Done, answer_of, submit_work

if TYPE_CHECKING:
    from distributed import Future

P = TypeVar("P")

RESULT_SECONDS = 60.0  # for a result to come; that of a worker that is lost meanwhile never does


@dataclass
class Chain(Generic[P]):
    """name: for messages; steps: called whenever the chain is begun, on whichever worker."""

    name: str
    steps: Callable[[], Iterable[P]]


@dataclass
class _Running(Generic[P]):
    chain: Chain[P]
    steps: Iterator[P]
    step: P
    future: Future


def run_chains(
    cluster: Cluster, function: Callable[[P], Any], chains: Sequence[Chain[P]], attempts: int = ATTEMPTS
) -> Generator[Done[P, Any], None, None]:
    """function(step) for each step of each chain, on as many workers as there are, one step of a worker at a time.

    A chain whose worker is lost, or fails with what is not a MillError, is begun again on another worker: its steps then come
    again. attempts: times that a chain is begun in all. Raises MillError in one line, with the worker's name, as `map_ordered`
    does.
    """
    return _Chains(cluster, function, chains, attempts).results()


class _Chains(Generic[P]):
    def __init__(self, cluster: Cluster, function: Callable[[P], Any], chains: Sequence[Chain[P]], attempts: int):
        self._cluster, self._function, self._attempts = cluster, function, attempts
        self._waiting = deque(chains)
        self._running: dict[str, _Running[P]] = {}
        self._begun: dict[str, int] = {}
        self._finished, self._watch = Event(), Watch(cluster)

    def results(self) -> Generator[Done[P, Any], None, None]:
        try:
            while self._waiting or self._running:
                self._assign()
                self._finished.clear()
                ready = [worker for worker, one in self._running.items() if one.future.done()]
                if not ready:
                    self._finished.wait(POLL_SECONDS)
                for worker in ready:
                    done = self._result(worker)
                    if done is not None:
                        yield done
        finally:
            for one in self._running.values():
                one.future.cancel(reason="the job has ended")

    def _assign(self) -> None:
        """Begins chains on workers that have none, and takes those of lost workers back."""
        present = self._watch.look()
        for worker in self._running.keys() - present.keys():
            self._take_back(worker, "was lost")
        for worker in present.keys() - self._running.keys():
            if self._waiting:
                chain = self._waiting.popleft()
                self._begun[chain.name] = self._begun.get(chain.name, 0) + 1
                self._go_on(worker, chain, iter(chain.steps()))

    def _go_on(self, worker: str, chain: Chain[P], steps: Iterator[P]) -> None:
        """The next step of a chain, if there is one; without one the worker is free."""
        self._running.pop(worker, None)
        for step in steps:
            future = submit_work(self._cluster, self._function, step, self._finished, workers=[worker])
            self._running[worker] = _Running(chain, steps, step, future)
            return

    def _take_back(self, worker: str, why: str) -> None:
        """The chain of a worker is begun again. Raises MillError when that has no prospect."""
        one = self._running.pop(worker)
        one.future.cancel()
        times = self._begun[one.chain.name]
        if times >= self._attempts:
            raise MillError(f"worker {self._cluster.name(worker)}: {one.chain.name}: {why} ({times} attempts)")
        self._waiting.appendleft(one.chain)

    def _result(self, worker: str) -> Done[P, Any] | None:
        one = self._running[worker]
        try:
            answer = answer_of(self._cluster, one.future, str(one.step), RESULT_SECONDS)
        except TimeoutError:  # it is asked for again, unless the worker is found to be lost
            return None
        if not answer.error:
            self._go_on(worker, one.chain, one.steps)
            return Done(one.step, answer.value, worker, answer.seconds)
        if answer.is_final and not answer.is_unfit:
            raise MillError(f"worker {self._cluster.name(worker)}: {one.step}: {answer.error}")
        self._take_back(worker, answer.error)
        if answer.is_unfit:
            self._cluster.refuse(worker, answer.error)
        return None
