"""How long a job will take yet, where its types are not equally fast: bytes alone would say what the present tensor takes."""

from __future__ import annotations

from collections.abc import Callable

from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...simd.compile.compile_time import seconds_without_compilation
from .forecast import Timing

_LEAST_BYTES = 1 << 30  # of a job whose types are measured first, which takes a tenth of a second each
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
    types = {kind.type.name for kind in plan.outputs.kinds if not kind.type.is_float}
    return Remaining(plan, threads, timing=timing) if len(types) > 1 and plan.total_bytes >= _LEAST_BYTES else None
