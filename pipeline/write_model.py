"""Carrying out a plan from the command line: the plan shown, the checks made, progress, the result."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..formats import PlanError, TensorSource, TensorType, open_gguf
from ..formats.deleted_shards import record_path
from ..jobs.execute import execute
from ..jobs.journal import journal_path
from ..jobs.plan import Plan
from ..jobs.preflight import complete_files, is_complete, preflight
from .console import byte_progress, emit, gib, table, warn
from .forecast import needs, needs_text, predicted
from .input_checks import refuse_problems, verification_text, verified, watch, write_manifest
from .job_options import Job

if TYPE_CHECKING:
    from ..convert.hub.delete_shards import ShardDeleter


def show_plan(
    plan: Plan,
    as_json: bool,
    seconds: dict[str, float] | None = None,
    more: Mapping[str, Any] | None = None,
    room: int | None = None,
) -> None:
    """The plan as JSON, or as a table of tensors with totals, the histogram of types, and what it needs.

    seconds: predicted for each type, see quantize/timing.py; None: not predicted. more: goes into the JSON. room: bytes on the
    disk, if the job takes others than the plan's.
    """
    if not as_json:
        warn(plan.warnings)
    summary = plan.as_json() | needs(plan, seconds, room) | dict(more or {})
    emit(summary, as_json, lambda: f"{plan_text(plan)}\n\n{needs_text(plan, seconds, room)}")


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


def weights_text(plan: Plan) -> str:
    return f"{len(plan.outputs)} tensors, {gib(plan.total_bytes)}, {plan.bits_per_weight:.3f} bits per weight"


def totals_text(plan: Plan) -> str:
    files = f" in {len(plan.files)} files" if len(plan.files) > 1 else ""
    return f"{weights_text(plan)}; on disk {plan.file_bytes:,} bytes{files}"


def protect(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuses an output that the job also reads, --force or not. Raises PlanError."""
    read = {p.resolve() for p in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise PlanError(f"{path} is an input of this job; choose another output")


def check_new(out: Path, force: bool) -> None:
    """Refuses a small output that is there already, without --force, and what `check_folder` does. Raises PlanError."""
    if out.exists() and not force:
        raise PlanError(f"{out} exists; use --force to replace it")
    check_folder(out)


def check_folder(out: Path) -> None:
    """Raises PlanError, before the work is done, if nothing can be written beside the output."""
    if not os.access(out.absolute().parent, os.W_OK):
        raise PlanError(f"{out.absolute().parent}: not a folder that can be written to")


def finished_before(
    source: str | Path, out: Path, mla_layout: str | None, job: Job, type: TensorType | str | None, recipe_text: str
) -> bool:
    """Whether --resume with --delete-source-shards finds the job finished, and all it was made of deleted; says so."""
    from ..convert.hub.delete_shards import completed_output
    from ..quantize.recipes.mixes import file_type_id
    from ..quantize.recipes.recipe import strip_folders

    if not job.resume or job.dry_run or job.force:
        return False
    number = file_type_id(type) if isinstance(type, str) else type.ftype if type is not None else None
    expected = {"ggufmill.recipe": strip_folders(recipe_text) or None} | (
        {} if number is None else {"general.file_type": number}
    )
    first = completed_output(source, out, mla_layout, expected)
    if first is None:
        return False
    done = {"files": [{"path": str(path), "nbytes": path.stat().st_size} for path in open_gguf(first).paths]}
    emit(done, job.as_json, lambda: f"{first}: finished already, and the shards it was made of are deleted")
    return True


def finish(
    plan: Plan,
    label: str,
    source: TensorSource,
    job: Job,
    *,
    inputs: Sequence[Path] = (),
    replaced: Sequence[tuple[str, int]] | None = None,
    delete_source_shards: bool = False,
    partial_requant: bool = False,
    timing: bool = False,
) -> None:
    """What a verb does with its plan: shows it (job.dry_run), or carries it out; and says what there is to say of the source.

    inputs: what is read beside the source's files, and so never written to. replaced: filled while the plan is carried out
    with (tensor name, weights written as 0); see `plan_quantize`. delete_source_shards: see convert/hub/delete_shards.py.
    partial_requant: files of the plan that are there already stay as they are. timing: a plan that is shown says how long it
    would take.
    """
    if job.verify and delete_source_shards:
        raise PlanError("--verify compares with the source, which --delete-source-shards deletes: give one of them")
    if partial_requant and len(plan.files) == 1:
        raise click.UsageError("--partial-requant does nothing for a single file: it keeps files of a split")
    read = [*source.files, *inputs]
    if job.resume and not (job.dry_run or job.force) and is_complete(plan, read):
        protect([file.path for file in plan.files], read)
        for path in source.files if delete_source_shards else ():
            record_path(path).unlink(missing_ok=True)
        _tell(plan, source, job, {}, f"{plan.files[0].path}: finished already, with {totals_text(plan)}")
        return
    if not job.as_json:
        for note in source.notes:
            click.echo(f"note: {note}", err=True)
    if job.dry_run:
        show_plan(plan, job.as_json, predicted(plan, job.threads) if timing else None)
        return
    gone = [path for path in source.files if not path.exists() and record_path(path).exists()]
    if gone and not (job.resume and journal_path(plan).exists()):
        raise PlanError(
            f"{gone[0]} was deleted by a job that used it (--delete-source-shards): go on with that job (--resume), "
            "or download it again"
        )
    kept = complete_files(plan) if partial_requant else set()
    if kept:
        click.echo(f"{len(kept)} of {len(plan.files)} files are there already and stay as they are", err=True)
    deleter = None
    if delete_source_shards:
        from ..convert.hub.delete_shards import ShardDeleter

        deleter = ShardDeleter(source, plan, kept)
    _write(plan, label, source, read, job, kept, deleter)
    if deleter is not None:
        deleter.close()
    warn_replaced(replaced or ())


def warn_replaced(replaced: Sequence[tuple[str, int]]) -> None:
    """Says for each tensor how many weights were written as 0; `replaced` has an item for each chunk that held such."""
    counts: Counter[str] = Counter()
    for name, count in replaced:
        counts[name] += count
    warn([f"{name}: {count} weights were not finite and are written as 0" for name, count in sorted(counts.items())])


def _write(
    plan: Plan,
    label: str,
    source: TensorSource,
    inputs: list[Path],
    job: Job,
    existing: Collection[int],
    deleter: ShardDeleter | None,
) -> None:
    """Checks and executes the plan with a progress bar; prints where the result is. existing, deleter: see `execute`.

    Raises MillError for a tensor that is not as it should be, if the job is to be verified. Ctrl-C becomes a KeyboardInterrupt
    whose text says how to go on.
    """
    needed = deleter.needed_bytes() if deleter is not None else None
    preflight(plan, force=job.force, resume=job.resume, inputs=inputs, existing=existing, needed=needed)
    if not job.as_json:
        warn(plan.warnings)
    how = {"threads": job.threads, "resume": job.resume, "force": job.force, "existing": existing, "on_finished": deleter}
    unchanged = watch(inputs) if deleter is None else None
    try:
        with byte_progress(plan.total_bytes, label) as progress:
            result = execute(plan, progress=progress, verify_inputs=unchanged, **how)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was finished is kept, --resume goes on with it") from None
    if result.resumed:
        click.echo(f"{result.resumed} of {len(plan.outputs)} tensors were there from the interrupted job", err=True)
    _tell(plan, source, job, result.checksums, f"{result.paths[0]}: {totals_text(plan)}")


def _tell(plan: Plan, source: TensorSource, job: Job, checksums: Mapping[str, str], line: str) -> None:
    """Prints what was done, after what is to be done with a finished output. checksums: of tensors that were written."""
    summary, lines, first = plan.as_json() | {"checksums": checksums}, [line], plan.files[0].path
    if job.manifest:
        written = write_manifest(first)
        summary["manifest"] = str(written)
        lines.append(f"{written}: checksums")
    found = verified(plan, source) if job.verify else None
    if found is not None:
        summary["verification"] = found.as_json()
        lines = [verification_text(found), *lines]
    emit(summary, job.as_json, lambda: "\n\n".join(lines))
    if found is not None:
        refuse_problems(found, first)
