"""What carrying out a plan takes: disk space, and time on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus

# Anonymous memory of a job, measured: that of the program with its kernels, and what a thread takes for chunks of rows.
_STARTED, _PER_THREAD = 135 << 20, 55 << 20
_TOGETHER = 28  # bytes of a weight whose row is encoded together with others


Timing = Callable[[Plan, int], dict[str, float]]  # a plan, on so many threads -> seconds by type of tensor


@dataclass(frozen=True)
class Forecast:
    """What a job takes.

    disk_needed  bytes that are still to be written; disk_free: None if unknown
    seconds      by type of tensor, None if not timed
    memory       bytes, at the most, that are no file's; None: not said
    disk_peak    bytes of all files when most is there, with those that are there already; None: as disk_needed
    """

    disk_needed: int
    disk_free: int | None
    seconds: dict[str, float] | None = None
    disk_peak: int | None = None
    memory: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The keys `disk`, `memory` and, if the encoders were timed, `predicted`."""
        figures: dict[str, Any] = {"disk": {"needed": self.disk_needed, "free": self.disk_free}}
        if self.disk_peak is not None:
            figures["disk"]["peak"] = self.disk_peak
        if self.memory is not None:
            figures["memory"] = {"peak": self.memory}
        if self.seconds is not None:
            figures["predicted"] = {"seconds": sum(self.seconds.values()), "seconds_by_type": dict(self.seconds)}
        return figures


def forecast(
    plan: Plan, disk_needed: int | None = None, *, timing: Timing | None = None, threads: int | None = None
) -> Forecast:
    """What a plan takes.

    disk_needed: bytes, if the job takes others than the plan's. timing: predicts the seconds, on so many threads (None: all
    processors).
    """
    seconds = timing(plan, threads or available_cpus()) if timing is not None else None
    folder = plan.files[0].path.absolute().parent
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = shutil.disk_usage(existing).free if existing is not None else None
    memory = _STARTED + (threads or available_cpus()) * _thread_bytes(plan) + plan.covariance_bytes
    return Forecast(plan.file_bytes if disk_needed is None else disk_needed, free, seconds, memory=memory)


def _thread_bytes(plan: Plan) -> int:
    """What a thread takes for rows: runs of those that are encoded together are larger than others."""
    if not plan.covariance_bytes:
        return _PER_THREAD
    ends = ((output, [*output.cuts, output.shape[1]]) for output in plan.outputs if output.cuts)
    runs = ((stop - start) * output.shape[0] for output, cuts in ends for start, stop in pairwise(cuts))
    return max(_PER_THREAD, _TOGETHER * max(runs, default=0))
