"""Covariances of inputs, and second moments of gradients at outputs, collected by workers: each sums some of them over all of
the text, in its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ...data_classes import dataclass
from ...errors import MillError
from ...imatrix.calibration import Calibration
from ...imatrix.collect import BatchResult, CollectOptions, run_batch
from ...imatrix.covariance.collector import CovarianceCollector
from ...imatrix.covariance.gradient_collector import GradientCollector
from ...imatrix.covariance.gradient_run import GradientRun, bound_threads
from ...imatrix.covariance.inputs import Input, reads_head
from ...imatrix.covariance.job import CovarianceJob, split_among
from ...imatrix.covariance.outputs import outputs_of
from ...imatrix.windows import observe_windows
from ...runtime import Model
from ...runtime.output_gradients import gradients_of
from ..common.figures import size_text
from ..common.messages import note
from .connection import Cluster, Watch
from .models import ModelAddress, models_here
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


USUAL_MEMORY = 8 << 30  # of a worker for sums, where no limit of its memory is known


@dataclass(frozen=True)
class _Group:
    """Inputs, or outputs, that one worker sums. job: fingerprint; number: of the group; dtype: of numbers in the file; memory:
    bytes for what the worker computes; seed: of the labels of gradients."""

    job: str
    number: int
    model: ModelAddress = field(repr=False)
    inputs: tuple[Input, ...] = field(repr=False)
    dtype: np.dtype = field(repr=False)
    memory: int
    seed: int = 0


@dataclass(frozen=True)
class _Windows:
    """A step: windows int64 [n, n_ctx] are added to the sums of a group.

    first      number of the first of them; weight: of their tokens
    options    what is collected for an importance matrix too; None: nothing, and predictions are not scored
    is_wanted  whether the result is what the importance matrix gets
    """

    group: _Group
    windows: np.ndarray
    first: int
    weight: int
    options: CollectOptions | None
    is_wanted: bool

    def __str__(self) -> str:
        return f"windows {self.first + 1} to {self.first + len(self.windows)}"

    def run(self) -> BatchResult | None:
        with models_here(self.group.model) as [model]:
            sums = _sums_here(self.group, self.first, model)
            sums.collector.weight, result = self.weight, None
            if isinstance(sums.collector, GradientCollector):
                gradients, (count, n_ctx) = gradients_of(model), self.windows.shape
                if count not in sums.threads:  # counting takes as long as the gradients of some windows
                    bound_threads(gradients, count, n_ctx, self.group.memory)
                    sums.threads[count] = gradients.threads
                gradients.threads = sums.threads[count]
                gradients.run(self.windows, self.group.seed, sums.collector.wanted, sums.collector.on_gradient)
            elif self.options is not None:
                result = run_batch(model, self.windows, self.weight, self.first, self.options, sums.collector)
            else:
                with model.observing(sums.collector):
                    observe_windows(model, self.windows, self.first)
            sums.windows += len(self.windows)
            return result if self.is_wanted else None


@dataclass(frozen=True)
class _Part:
    """A step: the covariance of a part, from sums that are complete: triangle, mean squares (see `fold`) and tokens."""

    group: _Group
    name: str
    matrix: int
    windows: int

    def __str__(self) -> str:
        return f"the covariance of {self.name}"

    def run(self) -> tuple[np.ndarray, np.ndarray, int]:
        with models_here(self.group.model) as [model]:
            sums = _sums_here(self.group, self.windows, model).collector
            folded = sums.take(self.name, self.matrix, self.group.dtype)
            return folded.triangle, folded.mean_squares, folded.tokens


def _run(step: _Windows | _Part) -> Any:
    """Runs on a worker."""
    return step.run()


@dataclass
class _Sums:
    """On a worker: the sums of a group, and how many windows they have. threads: by windows of a step, those that compute
    their gradients."""

    job: str
    number: int
    collector: CovarianceCollector
    windows: int = 0
    threads: dict[int, int] = field(default_factory=dict)


_sums: list[_Sums] = []  # one at most: a worker sums one group at a time


def _sums_here(group: _Group, windows: int, model: Model) -> _Sums:
    """Those that have so many windows; begun where that is none. Raises RuntimeError if this process has others."""
    if windows == 0:
        _sums.clear()  # first: both may not fit into memory
        outputs = outputs_of(group.inputs)
        collector = GradientCollector(outputs, model.workers) if outputs else CovarianceCollector(group.inputs, model.workers)
        _sums.append(_Sums(group.job, group.number, collector))
    if not _sums or (_sums[0].job, _sums[0].number, _sums[0].windows) != (group.job, group.number, windows):
        raise RuntimeError("the sums so far are gone: another job was begun on this worker, or it was started again")
    return _sums[0]


def _forget(job: str) -> None:
    """Runs on a worker, when a job has ended."""
    if _sums and _sums[0].job == job:
        _sums.clear()


class SharedCovariance:
    """A covariance that the workers of a cluster collect; an instance is what `collect` takes as `elsewhere`.

    The inputs are divided into groups, of which a worker sums one at a time: it runs the whole text, so that every sum is made
    in the order of the text, by one process. The first group's worker records what the importance matrix needs, too. Groups of
    outputs are by themselves, and their workers run the text forth and back.

    memory  bytes for the sums of a worker; None: half of what the worker with the least memory may take
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelAddress,
        opened: Model,
        calibration: Calibration,
        options: CollectOptions,
        job: CovarianceJob,
        memory: int | None,
    ):
        self._cluster, self._calibration, self._options, self._job = cluster, calibration, options, job
        workers, limit = max(1, len(cluster.look())), cluster.memory_limit()
        memory = memory or (limit // 2 if limit is not None else USUAL_MEMORY)
        left = [one for one in job.inputs if one.name not in job.finished]
        outputs = outputs_of(left)
        groups = split_among([one for one in left if one not in outputs], workers, memory, calibration.n_ctx)
        groups.sort(key=reads_head, reverse=True)  # first the one that is scored in any case
        seed = job.curvature.seed if job.curvature is not None else 0
        if outputs:
            back = GradientRun(opened, calibration, memory, seed)
            groups += split_among(outputs, workers, back.sums_memory, calibration.n_ctx)
            self._back = [slice(batch.start, batch.stop) for batch in back.batches(0)]
        of_all = job.writer.dtype, memory, seed
        self._groups = [_Group(job.fingerprint, i, model, tuple(group), *of_all) for i, group in enumerate(groups)]
        self._batches = list(calibration.batches(opened))
        self._recorded = 0  # windows that the importance matrix has
        self._done = [0] * len(groups)
        sums = max(sum(one.sums_bytes for one in group) for group in groups)
        note(
            f"covariance of {len(left)} inputs: the file takes {size_text(job.writer.nbytes)}, the sums up to "
            f"{size_text(sums)} of memory on each of {workers} workers; the text is run {len(groups)} times, once a group"
        )

    @property
    def reached(self) -> tuple[int, int]:
        """Windows that have been run, in all groups, and how many that will be."""
        return sum(self._done), len(self._groups) * len(self._calibration.windows)

    def __call__(self, batches: Sequence[slice]) -> Iterator[BatchResult]:
        """What each batch adds to the importance matrix, in order, while covariances are summed."""
        self._recorded = batches[0].start if batches else len(self._calibration.windows)
        return self._recorded_results(batches)

    def _recorded_results(self, batches: Sequence[slice]) -> Iterator[BatchResult]:
        for batch in batches:
            result = next(result for result in self._results if result is not None)
            self._recorded = batch.stop
            yield result

    def finish(self, on_step: Callable[[], None]) -> None:
        """Sums and writes what is left."""
        for _ in self._results:
            on_step()

    def close(self) -> None:
        """Ends what is being done, and frees the memory of workers."""
        from distributed import fire_and_forget

        self._results.close()
        for worker in self._cluster.look():
            fire_and_forget(self._cluster.client.submit(_forget, self._job.fingerprint, workers=[worker], pure=False))

    @cached_property
    def _results(self) -> Any:
        """A generator of the results of windows: what they add to the importance matrix, or None."""
        return self._run_groups()

    def _run_groups(self) -> Iterator[BatchResult | None]:
        job = self._job
        job.writer.begin()
        if not job.finished:
            job.prepare_state(0)
            job.commit_state()
        chains = [
            Chain(f"covariance, group {group.number + 1}", lambda group=group: self._steps(group)) for group in self._groups
        ]
        for done in run_chains(self._cluster, _run, chains):
            step = done.piece
            if isinstance(step, _Windows):
                number = step.group.number
                self._done[number] = max(self._done[number], step.first + len(step.windows))  # a group may be begun again
                yield done.value
            else:
                job.writer.write_folded(step.name, step.matrix, *done.value)
                self._record(step)

    def _record(self, step: _Part) -> None:
        """After the last part of a group its inputs are finished; those of the last group are so with the whole file."""
        inputs = step.group.inputs
        if (step.name, step.matrix) == (inputs[-1].name, inputs[-1].matrices - 1):
            names = [one.name for one in inputs]
            if len(self._job.finished) + len(names) < len(self._job.inputs):
                self._job.record_finished(names)

    def _steps(self, group: _Group) -> Iterator[_Windows | _Part]:
        text, is_back = self._calibration, bool(outputs_of(group.inputs))
        for batch in self._back if is_back else self._batches:
            is_wanted = group.number == 0 and batch.start >= self._recorded
            options = self._options if is_wanted or (reads_head(group.inputs) and not is_back) else None
            yield _Windows(group, text.windows[batch], batch.start, int(text.weights[batch.start]), options, is_wanted)
        for one in group.inputs:
            for matrix in range(one.matrices):
                yield _Part(group, one.name, matrix, len(text.windows))
