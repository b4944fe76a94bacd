"""Writing the files of a plan, by this process or by the workers of a cluster.

Types are not equally fast: bytes alone would say of the time that is left what the present tensor takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...formats import TYPES, TensorSource
from ...jobs.execute import JobResult, execute
from ...jobs.plan import Plan
from ...jobs.written_hashes import WrittenHashes
from ...operating_system.processors import available_cpus
from ...simd.compile.compile_time import seconds_without_compilation
from ..common.messages import warn
from ..common.progress import OnProgress, Stage
from .checks import watch_inputs
from .forecast import Timing, is_timed_first

if TYPE_CHECKING:
    from ...convert.hub.delete_shards import ShardDeleter
    from ..cluster.writing import Share
    from .write_options import WriteOptions


_LEAST_SECONDS = 3.0  # that a job has run before its own speed counts


class Remaining:
    """Called with the bytes that were written and the tensor's name, it tells the seconds that are left: those that the types'
    speeds suggest, times how much slower or faster the job has been than these so far."""

    def __init__(
        self,
        plan: Plan,
        threads: int | None,
        clock: Callable[[], float] = seconds_without_compilation,
        timing: Timing | None = None,
    ):
        from ...quantize.timing import seconds_per_byte

        speeds = seconds_per_byte(plan, threads or available_cpus(), timing)
        self._cost = {name: speeds[kind.type.name] for name, kind in plan.outputs.entries()}
        self._left = sum(kind.nbytes * n * speeds[kind.type.name] for kind, n in plan.outputs.counts())
        self._average = self._left / max(1, plan.total_bytes)
        self._clock, self._begun, self._done = clock, clock(), 0.0

    def __call__(self, nbytes: int, name: str) -> float:
        cost = nbytes * self._cost.get(name, self._average)
        self._left = max(0.0, self._left - cost)
        if name:  # else it was there already
            self._done += cost
        elapsed = self._clock() - self._begun
        pace = elapsed / self._done if self._done and elapsed > _LEAST_SECONDS else 1.0
        return self._left * pace


def remaining_of(plan: Plan, threads: int | None, timing: Timing | None = None) -> Remaining | None:
    """None for a job that is over soon, or of one type. timing: what predicts the seconds of a plan, if it is not the speed of
    encoders alone."""
    return Remaining(plan, threads, timing=timing) if is_timed_first(plan) else None


class Carried(NamedTuple):
    """What was written. replaced: tensor name -> weights that were not finite and are written as 0; hashes: of all of it, if
    they were asked for and it was all written now, here; shares: of each worker."""

    job: JobResult
    replaced: dict[str, int]
    hashes: WrittenHashes | None = None
    shares: Sequence[Share] = ()


def carry_out(
    plan: Plan,
    label: str,
    source: TensorSource,
    options: WriteOptions,
    report: OnProgress,
    *,
    inputs: Sequence[Path],
    existing: Collection[int] = (),
    deleter: ShardDeleter | None = None,
) -> Carried:
    """Executes a plan. label: the stage's name in reports; inputs: files that must not change meanwhile; existing, deleter: see
    `execute`. What is replaced is a warning for each tensor. Raises as `execute`."""
    tuning = options.tuning or (options.sequential.tuning if options.sequential is not None else None)
    writing, threads = nullcontext(), options.threads or available_cpus()
    hashes = WrittenHashes(plan, threads) if options.manifest and tuning is None else None
    finish = tuning.finisher(plan, report, resume=options.resume and not options.force) if tuning is not None else None
    if options.cluster is not None:
        from ..cluster.writing import cluster_writer

        writing = cluster_writer(options.cluster, plan, source)
    if options.cluster is None:
        _compile_encoders(plan)
    stage = Stage(report, label, plan.total_bytes)
    if options.cluster is None and options.sequential is None:
        stage.estimate = remaining_of(plan, options.threads, options.timing)
    with writing as writer:
        write = writer
        if options.sequential is not None:
            options.sequential.on_item = lambda item: stage.within(0.0, item)
            write = options.sequential.writer(plan, threads, writer)
        result = execute(
            plan,
            threads=options.threads,
            resume=options.resume,
            force=options.force,
            progress=stage.advance,
            existing=existing,
            on_finished=deleter,
            verify_inputs=watch_inputs(inputs) if deleter is None else None,
            write=write,
            on_bytes=hashes.update if hashes is not None else None,
            finish=finish,
        )
    if tuning is not None:
        tuning.forget(plan)
    hashes = hashes if hashes is not None and hashes.is_complete else None
    if writer is None:
        return Carried(result, _counted(plan.replaced or ()), hashes)
    return Carried(result, _counted(writer.replaced), shares=writer.sorted_shares())


def _compile_encoders(plan: Plan) -> None:
    """Has other processes compile what encodes the plan's tensors, where there are several types."""
    kinds = {(TYPES.plain(each.type), each.source_type, getattr(each.produce, "is_weighted", False)) for each in plan.outputs}
    encoded = ((kind, weighted) for kind, source_type, weighted in kinds if not kind.is_float and kind.name != source_type)
    types = sorted(encoded, key=lambda each: each[0].id)
    if len(types) > 1 and available_cpus() > 1:
        from ...quantize.codec_kernels import compile_codecs_in_background

        compile_codecs_in_background(types)


def _counted(replaced: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Tensor name -> weights that were written as 0, with a warning for each; `replaced` has an item for each chunk of rows."""
    counts: Counter[str] = Counter()
    for name, count in replaced:
        counts[name] += count
    warn([f"{name}: {count} weights were not finite and are written as 0" for name, count in sorted(counts.items())])
    return dict(sorted(counts.items()))
