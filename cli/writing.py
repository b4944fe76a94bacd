"""Carrying out a plan from the command line: the plan shown, the checks made, progress, the result."""

from __future__ import annotations

from pathlib import Path

import click

from ..formats.execute import Result, execute, preflight
from ..formats.plan import Plan
from .console import byte_progress, emit, gib, table, warn


def show_plan(plan: Plan, as_json: bool) -> None:
    """The plan as JSON, or as a table of tensors with totals and the histogram of types."""
    if not as_json:
        warn(plan.warnings)
    emit(plan.as_json(), as_json, lambda: plan_text(plan))


def plan_text(plan: Plan) -> str:
    tensors = [
        (
            o.name,
            " x ".join(map(str, o.shape)),
            o.source_type,
            o.type.name,
            o.nbytes,
            f"{o.rule} ({o.note})" if o.note else o.rule,
        )
        for o in plan.outputs
    ]
    return "\n\n".join(
        [table(("tensor", "shape", "from", "to", "bytes", "rule"), tensors), histogram_text(plan), totals_text(plan)]
    )


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def histogram_text(plan: Plan) -> str:
    rows = [(name, n, gib(size), f"{size / plan.total_bytes:.1%}") for name, (n, size) in plan.histogram().items()]
    return table(("type", "tensors", "size", "share"), rows)


def totals_text(plan: Plan) -> str:
    files = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
    return (
        f"{len(plan.outputs)} tensors, {gib(plan.total_bytes)}, {plan.bits_per_weight:.3f} bits per weight; "
        f"on disk {plan.file_bytes:,} bytes{files}"
    )


def write(
    plan: Plan,
    label: str,
    inputs: list[Path],
    *,
    threads: int | None,
    resume: bool,
    force: bool,
    as_json: bool = False,
) -> Result:
    """Checks and executes the plan with a progress bar; prints where the result is."""
    preflight(plan, force=force, resume=resume, inputs=inputs)
    if not as_json:
        warn(plan.warnings)
    with byte_progress(plan.total_bytes, label) as progress:
        result = execute(plan, threads=threads, resume=resume, force=force, progress=progress)
    if result.resumed:
        click.echo(f"{result.resumed} of {len(plan.outputs)} tensors were there from the interrupted job", err=True)
    summary = plan.as_json() | {"checksums": result.checksums}
    emit(summary, as_json, lambda: f"{result.paths[0]}: {totals_text(plan)}")
    return result
