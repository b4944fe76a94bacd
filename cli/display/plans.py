"""Plans and written models as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...pipeline.common.messages import duration, gib
from .console import table

if TYPE_CHECKING:
    from ...jobs.outputs import Output
    from ...jobs.plan import Plan
    from ...pipeline.cluster.writing import Share
    from ...pipeline.writing.forecast import Forecast
    from ...pipeline.writing.write_model import WriteResult
    from ...quantize.verify import Verification


def written_text(result: WriteResult) -> str:
    """What a verb that writes a model prints: its plan, or where the output is and what was checked."""
    first, plan = result.files[0], result.plan
    if plan is None:
        return f"{first}: finished already, and the shards it was made of are deleted"
    if result.forecast is not None:
        return f"{plan_text(plan)}\n\n{forecast_text(result.forecast)}"
    parts = [verification_text(result.verification)] if result.verification is not None else []
    done = "finished already, with " if result.status == "finished before" else ""
    parts.append(f"{first}: {done}{totals_text(plan)}")
    if result.shares:
        parts.insert(0, shares_text(result.shares))
    if result.manifest is not None:
        parts.append(f"{result.manifest}: checksums")
    return "\n\n".join(parts)


def shares_text(shares: Sequence[Share]) -> str:
    """A row per worker of a cluster."""
    total = sum(share.nbytes for share in shares) or 1
    rows = [(s.worker, s.pieces, gib(s.nbytes), f"{s.nbytes / total:.1%}", duration(s.seconds)) for s in shares]
    return table(("worker", "pieces", "size", "share", "time"), rows)


def plan_text(plan: Plan) -> str:
    """A row per tensor, the histogram of types, and the totals."""

    def row(o: Output) -> tuple[object, ...]:
        rule = f"{o.rule} ({o.note})" if o.note else o.rule
        return (o.name, shape_text(o.shape), o.source_type, o.type.name, o.nbytes, rule)

    tensors = table(("tensor", "shape", "from", "to", "bytes", "rule"), plan.outputs, row)
    return "\n\n".join([tensors, histogram_text(plan), totals_text(plan)])


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def histogram_text(plan: Plan) -> str:
    """Tensors, size and share of each type."""
    rows = [(name, n, gib(size), f"{size / plan.total_bytes:.1%}") for name, (n, size) in plan.histogram().items()]
    return table(("type", "tensors", "size", "share"), rows)


def weights_text(plan: Plan) -> str:
    return f"{len(plan.outputs)} tensors, {gib(plan.total_bytes)}, {plan.bits_per_weight:.3f} bits per weight"


def totals_text(plan: Plan) -> str:
    files = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
    return f"{weights_text(plan)}; on disk {plan.file_bytes:,} bytes{files}"


def forecast_text(forecast: Forecast) -> str:
    """Disk space, and the time of the slowest types if that was predicted."""
    free = f", {gib(forecast.disk_free)} free" if forecast.disk_free is not None else ""
    peak = forecast.disk_peak
    most = f", {gib(peak)} at the peak with what is there" if peak is not None and peak != forecast.disk_needed else ""
    lines = [f"disk: {gib(forecast.disk_needed)} needed{most}{free}"]
    if forecast.memory is not None:
        lines.append(f"memory: {gib(forecast.memory)} beside the files that are read and written")
    if forecast.seconds is not None:
        slowest = sorted(forecast.seconds.items(), key=lambda item: -item[1])[:4]
        types = ", ".join(f"{name} {duration(seconds)}" for name, seconds in slowest)
        total = duration(sum(forecast.seconds.values()))
        lines.append(f"time: about {total} on this machine ({types}), unless reading the source takes longer")
    return "\n".join(lines)


def verification_text(verification: Verification) -> str:
    """A row per type."""
    rows = [
        (
            t["type"],
            t["tensors"],
            t["rows"],
            *("-" if t[key] is None else f"{t[key]:.6f}" for key in ("error_mean", "error_max", "expected")),
            t["problems"] or "-",
        )
        for t in verification.by_type()
    ]
    return table(("type", "tensors", "rows read", "mean error", "largest", "expected below", "problems"), rows)
