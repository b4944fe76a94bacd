"""Carrying out a plan from the command line: the plan shown, the checks made, progress, the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..formats import PlanError, TensorSource
from ..formats.execute import Result, execute, finished_files, journal_path, preflight
from ..formats.plan import Plan
from ..formats.released import stub
from .checking import refuse_problems, verification_text, verified, watch, write_manifest
from .console import byte_progress, emit, gib, table, warn
from .forecast import needs, needs_text, predicted

if TYPE_CHECKING:
    from ..convert.release import Releaser


def show_plan(plan: Plan, as_json: bool, seconds: dict[str, float] | None = None) -> None:
    """The plan as JSON, or as a table of tensors with totals, the histogram of types, and what it needs.

    seconds: predicted for each type, see quantize/timing.py; None: not predicted.
    """
    if not as_json:
        warn(plan.warnings)
    emit(plan.as_json() | needs(plan, seconds), as_json, lambda: f"{plan_text(plan)}\n\n{needs_text(plan, seconds)}")


def plan_text(plan: Plan) -> str:
    tensors = [
        (
            o.name,
            shape_text(o.shape),
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


def protect(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuses an output that the job also reads, --force or not. Raises PlanError."""
    read = {p.resolve() for p in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise PlanError(f"{path} is an input of this job; choose another output")


def finish(
    plan: Plan,
    label: str,
    source: TensorSource,
    *,
    inputs: Sequence[Path] = (),
    replaced: Sequence[tuple[str, int]] | None = None,
    delete_source_shards: bool = False,
    partial_requant: bool = False,
    verify: bool = False,
    manifest: bool = False,
    dry_run: bool,
    timing: bool = False,
    resume: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """What a verb does with its plan: shows it (dry_run), or carries it out; and says what there is to say of the source.

    inputs: what is read beside the source's files, and so never written to. replaced: filled while the plan is carried out
    with (tensor name, weights written as 0); see `plan_quantize`. delete_source_shards: see convert/release.py.
    partial_requant: files of the plan that are there already stay as they are. verify: see quantize/verify.py. manifest: the
    output's checksums are written beside it. timing: a plan that is shown says how long it would take.
    """
    if verify and delete_source_shards:
        raise PlanError("--verify compares with the source, which --delete-source-shards deletes: give one of them")
    if not as_json:
        for note in source.notes:
            click.echo(f"note: {note}", err=True)
    if dry_run:
        show_plan(plan, as_json, predicted(plan, threads) if timing else None)
        return
    gone = [path for path in source.files if not path.exists() and stub(path).exists()]
    if gone and not (resume and journal_path(plan).exists()):
        raise PlanError(
            f"{gone[0]} was deleted by a job that used it (--delete-source-shards): go on with that job (--resume), "
            "or download it again"
        )
    kept = finished_files(plan) if partial_requant else set()
    if kept:
        click.echo(f"{len(kept)} of {len(plan.files)} files are there already and stay as they are", err=True)
    releaser = None
    if delete_source_shards:
        from ..convert.release import Releaser

        releaser = Releaser(source, plan, kept)
    job = {"threads": threads, "resume": resume, "force": force, "as_json": as_json}
    write(
        plan,
        label,
        [*source.files, *inputs],
        kept=kept,
        releaser=releaser,
        verify=source if verify else None,
        manifest=manifest,
        **job,
    )
    if releaser is not None:
        releaser.close()
    warn_replaced(replaced or ())


def warn_replaced(replaced: Sequence[tuple[str, int]]) -> None:
    """Says for each tensor how many weights were written as 0; `replaced` has an item for each chunk that held such."""
    counts: Counter[str] = Counter()
    for name, count in replaced:
        counts[name] += count
    warn([f"{name}: {count} weights were not finite and are written as 0" for name, count in sorted(counts.items())])


def write(
    plan: Plan,
    label: str,
    inputs: list[Path],
    *,
    threads: int | None,
    resume: bool,
    force: bool,
    as_json: bool = False,
    kept: Collection[int] = (),
    releaser: Releaser | None = None,
    verify: TensorSource | None = None,
    manifest: bool = False,
) -> Result:
    """Checks and executes the plan with a progress bar; prints where the result is. kept, releaser: see `execute`.

    verify: what the plan was made from, to compare samples of the files with; raises MillError for a tensor that is not as it
    should be. manifest: the checksums are written beside the first file.
    Ctrl-C becomes a KeyboardInterrupt whose text says how to go on.
    """
    needed = releaser.needed() if releaser is not None else None
    preflight(plan, force=force, resume=resume, inputs=inputs, kept=kept, needed=needed)
    if not as_json:
        warn(plan.warnings)
    unchanged = watch(inputs) if releaser is None else None
    job = {"threads": threads, "resume": resume, "force": force, "kept": kept, "finished": releaser, "unchanged": unchanged}
    try:
        with byte_progress(plan.total_bytes, label) as progress:
            result = execute(plan, progress=progress, **job)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was finished is kept, --resume goes on with it") from None
    if result.resumed:
        click.echo(f"{result.resumed} of {len(plan.outputs)} tensors were there from the interrupted job", err=True)
    summary = plan.as_json() | {"checksums": result.checksums}
    lines = [f"{result.paths[0]}: {totals_text(plan)}"]
    if manifest:
        written = write_manifest(result.paths[0])
        summary["manifest"] = str(written)
        lines.append(f"{written}: checksums")
    found = verified(plan, verify) if verify is not None else None
    if found is not None:
        summary["verification"] = found.as_json()
        lines = [verification_text(found), *lines]
    emit(summary, as_json, lambda: "\n\n".join(lines))
    if found is not None:
        refuse_problems(found, result.paths[0])
    return result
