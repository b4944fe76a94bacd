"""What a plan needs: room on the disk, and time on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from ..jobs.plan import Plan
from .console import gib


def predicted(plan: Plan, threads: int | None) -> dict[str, float]:
    """Seconds by type, from a short sample of this machine's encoders."""
    from ..quantize.timing import predict_seconds

    return predict_seconds(plan, threads or len(os.sched_getaffinity(0)))


def needs(plan: Plan, seconds: Mapping[str, float] | None, room: int | None = None) -> dict[str, Any]:
    """room: bytes on the disk, if the job takes others than the plan's.

    disk: bytes needed, and free where the output goes (None where that cannot be told); predicted: seconds, if known.
    """
    found: dict[str, Any] = {"disk": {"needed": room or plan.file_bytes, "free": _free(plan)}}
    if seconds is not None:
        found["predicted"] = {"seconds": sum(seconds.values()), "seconds_by_type": dict(seconds)}
    return found


def needs_text(plan: Plan, seconds: Mapping[str, float] | None, room: int | None = None) -> str:
    free = _free(plan)
    lines = [f"disk: {gib(room or plan.file_bytes)} needed" + (f", {gib(free)} free" if free is not None else "")]
    if seconds is not None:
        slowest = sorted(seconds.items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{name} {duration(s)}" for name, s in slowest)
        lines.append(f"time: about {duration(sum(seconds.values()))} of work on this machine ({parts}), if reading keeps up")
    return "\n".join(lines)


def _free(plan: Plan) -> int | None:
    folder = plan.files[0].path.absolute().parent
    existing = next((p for p in (folder, *folder.parents) if p.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None else None


def duration(seconds: float) -> str:
    """'12 s', '3.4 min', '1.2 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
