"""A function of many pieces, made by the workers of a cluster: a bounded number in flight, results in order or as they come."""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import field
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...data_classes import dataclass
from ...errors import MillError, PlanError
from .connection import POLL_SECONDS, Cluster, Watch

if TYPE_CHECKING:
    from distributed import Future

P = TypeVar("P")
R = TypeVar("R")

PER_THREAD = 2  # pieces in flight for each thread of a worker: one is worked on, one is there already when that is finished
ATTEMPTS = 3


class UnfitWorker(MillError):
    """Raised on a worker that can make none of a job's pieces, whatever the others can: it gets no more of them."""


@dataclass(frozen=True)
class Done(Generic[P, R]):
    """A finished piece: what the function made of it, the address of the worker that did it, and the seconds that took it."""

    piece: P
    value: R
    worker: str
    seconds: float


@dataclass(frozen=True)
class WorkerReply:
    """What a worker sends back. error: one line; is_final: another attempt would fail the same way; is_unfit: only there."""

    value: Any
    worker: str
    seconds: float
    error: str = ""
    is_final: bool = False
    is_unfit: bool = False


@dataclass
class _Task(Generic[P]):
    """A piece in flight. home: the worker that should do it, if one should; failed: workers that could not, oldest first."""

    piece: P
    future: Future
    home: str | None = None
    failed: list[str] = field(default_factory=list)


def map_ordered(
    cluster: Cluster,
    function: Callable[[P], R],
    pieces: Iterable[P],
    *,
    ordered: bool = True,
    per_thread: int = PER_THREAD,
    attempts: int = ATTEMPTS,
    name: Callable[[P], str] = str,
    near: Callable[[P], str] | None = None,
) -> Generator[Done[P, R], None, None]:
    """function(piece) for each piece, on the workers of the cluster; `pieces` is only drawn from as results are consumed.

    It is drawn from again after each result even when it had ended, so that it may go on with pieces that come of results.

    function    of a module, so that workers can import it; it gives the same result wherever and however often it is called
    ordered     results come in the order of the pieces, else as they are finished
    per_thread  pieces in flight, those included whose results are not yet consumed, for each thread of the workers
    attempts    after a failure that is not a MillError (a full disk, a bug) a piece is given to another worker, up to so many
                times in all; a MillError is final; after an UnfitWorker that worker gets no more pieces. Pieces of lost
                workers are given to others by dask, as often as its setting distributed.scheduler.allowed-failures says
    name        of a piece, for messages
    near        what a piece reads, such as a file: pieces that read the same go to the same machine as long as that has no
                more in flight than others, in every job, since the machine may still have it in memory

    Raises MillError in one line, with the worker's name, for a piece that cannot be made, and when the scheduler or all workers
    are lost. What is in flight is then cancelled; so it is when the iterator is closed.
    """
    return _Map(cluster, function, iter(pieces), ordered, per_thread, attempts, name, near).results()


def run_on_each(cluster: Cluster, function: Callable[[P], Any], piece: P) -> None:
    """Runs a function once on each worker that is there now, before a job. Raises PlanError, with the worker's name, where it
    raises one."""
    client = cluster.client
    futures = {w: client.submit(_work, function, piece, workers=[w], pure=False) for w in cluster.look()}
    finished = Event()
    for future in futures.values():
        future.add_done_callback(lambda _: finished.set())
    try:
        while futures:
            finished.clear()
            for worker, future in list(futures.items()):
                if future.done():
                    answer = future.result()
                    if answer.error:
                        raise PlanError(f"worker {cluster.name(worker)}: {answer.error}")
                    del futures[worker]
            if futures and not finished.wait(POLL_SECONDS):
                present = cluster.look()
                futures = {worker: future for worker, future in futures.items() if worker in present}
    finally:
        for future in futures.values():
            future.cancel()


def results_of(cluster: Cluster, function: Callable[[P], R], pieces: Iterable[P]) -> Generator[R, None, None]:
    """What `map_ordered` makes of the pieces, in order, and nothing else."""
    with closing(map_ordered(cluster, function, pieces)) as results:
        for done in results:
            yield done.value


class _Map(Generic[P, R]):
    """The pieces in flight of one call of `map_ordered`."""

    def __init__(
        self,
        cluster: Cluster,
        function: Callable[[P], R],
        pieces: Iterator[P],
        ordered: bool,
        per_thread: int,
        attempts: int,
        name: Callable[[P], str],
        near: Callable[[P], str] | None,
    ):
        self._cluster, self._function, self._pieces = cluster, function, pieces
        self._ordered, self._per_thread, self._attempts, self._name = ordered, per_thread, attempts, name
        self._near = near
        self._tasks: deque[_Task[P]] = deque()
        self._workers: dict[str, int] = {}
        self._finished = Event()  # set by any task
        self._watch = Watch(cluster)

    def results(self) -> Generator[Done[P, R], None, None]:
        try:
            while self._fill():
                task = self._next_finished()
                if task is None:
                    continue
                answer = answer_of(self._cluster, task.future, self._name(task.piece))
                if answer.error:
                    self._retry(task, answer)
                else:
                    self._tasks.remove(task)
                    yield Done(task.piece, answer.value, answer.worker, answer.seconds)
            self._cluster.look()  # who was lost just before the end is named too
        finally:
            for task in self._tasks:
                task.future.cancel(reason="the job has ended")

    def _fill(self) -> bool:
        """Submits pieces until enough are in flight; False when all are finished."""
        self._workers = self._watch.look()
        while len(self._tasks) < self._per_thread * max(1, sum(self._workers.values())):
            for piece in self._pieces:
                home = self._home(piece)
                self._tasks.append(_Task(piece, self._submit(piece, home=home), home))
                break
            else:
                break
        return bool(self._tasks)

    def _home(self, piece: P) -> str | None:
        """The worker that should do a piece, by what it is near to: of those with less than their share in flight the one whose
        machine comes first for that, in an order that is the same in every job (rendezvous hashing)."""
        if self._near is None or self._cluster.refused:
            return None
        load, what = Counter(task.home for task in self._tasks), self._near(piece)
        free = [worker for worker, threads in self._workers.items() if load[worker] < self._per_thread * threads]
        return max(free, key=lambda w: (_rank(what, self._cluster.host(w)), -load[w]), default=None)

    def _submit(self, piece: P, avoid: Iterable[str] = (), home: str | None = None) -> Future:
        """avoid: workers that are not given the piece, if there are others. home: the worker that should do it, if it has time
        for it."""
        allowed = [address for address in self._workers if address not in avoid]
        restricted: dict[str, Any] = {"workers": allowed} if allowed and (avoid or self._cluster.refused) else {}
        if home is not None and not restricted:
            restricted = {"workers": [home], "allow_other_workers": True}
        return submit_work(self._cluster, self._function, piece, self._finished, **restricted)

    def _next_finished(self) -> _Task[P] | None:
        """The task whose result is due, once it is there; None after a while."""
        self._finished.clear()
        due = [self._tasks[0]] if self._ordered else self._tasks
        found = next((task for task in due if task.future.done()), None)
        if found is None:
            self._finished.wait(POLL_SECONDS)
        return found

    def _retry(self, task: _Task[P], answer: WorkerReply) -> None:
        """Gives the piece to another worker. Raises MillError when that has no prospect."""
        task.failed.append(answer.worker)
        if answer.is_unfit:
            self._cluster.refuse(answer.worker, answer.error)
            self._workers = self._watch.look(now=True)
            if not self._workers:
                raise MillError(f"worker {self._cluster.name(answer.worker)}: {answer.error}")
        elif answer.is_final or len(task.failed) >= self._attempts:
            worker = self._cluster.name(answer.worker)
            times = f" ({len(task.failed)} attempts)" if len(task.failed) > 1 else ""
            raise MillError(f"worker {worker}: {self._name(task.piece)}: {answer.error}{times}")
        task.future = self._submit(task.piece, avoid=task.failed)


def submit_work(cluster: Cluster, function: Callable[[P], Any], piece: P, finished: Event, **restricted: Any) -> Future:
    """Has a worker call function(piece), for `answer_of`. finished: set once that is done; restricted: to which workers, as for
    `Client.submit`."""
    future = cluster.client.submit(_work, function, piece, pure=False, **restricted)
    future.add_done_callback(lambda _: finished.set())
    return future


def answer_of(cluster: Cluster, future: Future, piece: str, timeout: float | None = None) -> WorkerReply:
    """What came of a piece with this name. Raises MillError if nothing did: workers died of it, or the scheduler is lost;
    TimeoutError if it does not come in so many seconds."""
    from distributed import KilledWorker

    try:
        return future.result(timeout=timeout)
    except KilledWorker as error:
        raise MillError(
            f"{piece}: {error.allowed_failures + 1} workers died of it, last {error.last_worker.address}; workers that run "
            "out of memory are ended by dask (--memory-limit of `dask worker`)"
        ) from None
    except TimeoutError:
        raise
    except Exception as error:
        if future.status in ("cancelled", "lost") or cluster.client.status not in ("running", "newly-created"):
            raise MillError(f"the scheduler at {cluster.address} is lost") from None
        raise MillError(f"{piece}: {_first_line(error)}") from error


def _rank(what: str, host: str) -> bytes:
    return hashlib.sha256(f"{what}\0{host}".encode()).digest()


def _work(function: Callable[[Any], Any], piece: Any) -> WorkerReply:
    """Runs on a worker."""
    from distributed import get_worker

    worker, started = get_worker().address, perf_counter()
    try:
        return WorkerReply(function(piece), worker, perf_counter() - started)
    except MillError as error:
        return WorkerReply(None, worker, perf_counter() - started, str(error), True, isinstance(error, UnfitWorker))
    except Exception as error:
        return WorkerReply(None, worker, perf_counter() - started, _described(error))


def _described(error: Exception) -> str:
    """An unexpected exception in one line, with the place of ours that raised it."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('ggufmill')[2].lstrip('/')}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_first_line(error)}{place}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
