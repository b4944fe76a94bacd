"""Plans and written models as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...pipeline.common.figures import bits_per_weight_text, duration, file_text, share_text, size_text
from .console import table

if TYPE_CHECKING:
    from ...jobs.outputs import Output
    from ...jobs.plan import Plan
    from ...pipeline.cluster.writing import Share
    from ...pipeline.writing.write_model import WriteResult
    from ...quantize.verify import Verification


def written_text(result: WriteResult) -> str:
    """What a verb that writes a model prints: its plan, or where the output is and what was checked."""
    first, plan = result.files[0], result.plan
    if plan is None:
        return f"{first}: finished already, and the shards it was made of are deleted"
    if result.forecast is not None:
        return f"{plan_text(plan)}\n\n{result.forecast.text}"
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
    rows = [(s.worker, s.pieces, size_text(s.nbytes), share_text(s.nbytes / total), duration(s.seconds)) for s in shares]
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
    rows = [(name, n, size_text(size), share_text(size / plan.total_bytes)) for name, (n, size) in plan.histogram().items()]
    return table(("type", "tensors", "size", "share"), rows)


def weights_text(plan: Plan) -> str:
    """Tensors, bits per weight and size, where the file's metadata are not all known yet."""
    size = size_text(plan.file_bytes)
    return f"{len(plan.outputs):,} tensors, {bits_per_weight_text(plan.bits_per_weight)}, about {size}"


def totals_text(plan: Plan) -> str:
    """Tensors, bits per weight, and the size of the file or files."""
    files = file_text(plan.file_bytes, len(plan.files))
    return f"{len(plan.outputs):,} tensors, {bits_per_weight_text(plan.bits_per_weight)}, {files}"


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
