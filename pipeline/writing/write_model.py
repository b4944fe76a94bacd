"""Carrying out a plan: checked, written, verified; the result as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...errors import CheckFailed, PlanError, UsageError
from ...formats import TensorSource, TensorType, open_gguf
from ...formats.deleted_shards import record_path
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ...jobs.preflight import complete_files, is_complete, preflight
from ...jobs.shards import only_shards, without_files
from ...jobs.streamed_json import StreamedJson
from ...jobs.written_hashes import WrittenHashes
from ...operating_system.numa import thread_notes
from ...operating_system.processors import available_cpus
from ..common.arguments import refuse_inputs
from ..common.dropped_config import warn_on_dropped_config
from ..common.forecast import Forecast
from ..common.messages import note, warn
from ..common.progress import OnProgress
from ..common.shown import shown
from ..common.vocabulary_check import vocabulary_differences
from .carry_out import carry_out
from .checks import problem_line, verify_written, write_manifest
from .forecast import forecast
from .write_options import WriteOptions

if TYPE_CHECKING:
    from ...convert.hub.delete_shards import ShardDeleter
    from ...convert.lora import AdapterFile
    from ...quantize.verify import Verification
    from ..cluster.writing import Share


@shown
@dataclass
class WriteResult(StreamedJson):
    """What became of a plan to write a model.

    status        'planned' (dry_run: nothing was written), 'written', or 'finished before' (resume of a job that is done)
    files         paths of the output, in order
    plan          every tensor with its type, the rule that chose it, offset and size, and the totals; None for a job that was
                  finished before and whose source is deleted, so that it cannot be planned again
    forecast      disk space and time that the plan takes; only with dry_run
    checksums     tensor name -> xxh3-64 of its bytes in hex, for what was written
    resumed       tensors that were there from an interrupted job
    replaced      tensor name -> weights that were NaN or infinite and are written as 0
    manifest      the file of checksums next to the output, if it was asked for
    verification  samples read back and compared with the source, if it was asked for
    shares        what each worker of a cluster did
    """

    status: str
    files: list[Path]
    plan: Plan | None = None
    forecast: Forecast | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    resumed: int = 0
    replaced: dict[str, int] = field(default_factory=dict)
    manifest: Path | None = None
    verification: Verification | None = None
    shares: Sequence[Share] = ()

    def json_fields(self) -> dict[str, Any]:
        """What --json prints: the plan, with `disk` and `predicted` of a plan alone, else with `checksums`, and with `manifest`
        and `verification` if they were asked for."""
        if self.plan is None:
            return {"files": [{"path": str(path), "nbytes": path.stat().st_size} for path in self.files]}
        summary = self.plan.json_fields()
        if self.forecast is not None:
            return summary | self.forecast.as_json()
        summary["checksums"] = dict(self.checksums)
        if self.manifest is not None:
            summary["manifest"] = str(self.manifest)
        if self.verification is not None:
            summary["verification"] = self.verification.as_json()
        if self.shares:
            summary["cluster"] = [asdict(share) for share in self.shares]
        return summary


def finished_without_source(
    source: str | Path,
    out: Path,
    mla_layout: str | None,
    options: WriteOptions,
    type: TensorType | str | None,
    recipe_text: str,
    lora: Sequence[str | Path | AdapterFile] = (),
) -> WriteResult | None:
    """The result of a job with `delete_source_shards` that was finished before: its source is gone, and it cannot be planned
    again. None if there is no such, or without `resume`."""
    from ...convert.hub import delete_shards
    from ...convert.lora.merge import RECORD, record
    from ...quantize.recipes.mixes import file_type_id
    from ...quantize.recipes.recipe import strip_folders

    if not options.resume or options.dry_run or options.force:
        return None
    number = file_type_id(type) if isinstance(type, str) else type.ftype if type is not None else None
    expected: dict[str, Any] = {"ggufmill.recipe": strip_folders(recipe_text) or None, RECORD: record(lora) or None}
    if number is not None:
        expected["general.file_type"] = number
    first = delete_shards.completed_output(source, out, mla_layout, expected)
    return WriteResult("finished before", open_gguf(first).paths) if first is not None else None


def write_model(
    plan: Plan,
    label: str,
    source: TensorSource,
    options: WriteOptions,
    report: OnProgress,
    *,
    inputs: Sequence[Path] = (),
    delete_source_shards: bool = False,
    partial_requant: bool = False,
) -> WriteResult:
    """Carries out a plan, or with options.dry_run works out what that takes.

    label: the stage's name in reports of progress. inputs: what is read beside the source's files, and so never written to.
    delete_source_shards: see convert/hub/delete_shards.py.
    partial_requant: files of the plan that are there already stay as they are.

    Raises PlanError for what stands in the way before anything is written, MillError for what fails on the way (`resume` then
    continues), CheckFailed when a tensor is not as it should be. Ctrl-C becomes a KeyboardInterrupt that says how to continue.
    """
    if options.verify and delete_source_shards:
        raise PlanError("--verify compares with the source, which --delete-source-shards deletes: give one of them")
    if partial_requant and len(plan.files) == 1:
        raise UsageError("--partial-requant does nothing for a single file: it keeps files of a split")
    if options.shards is not None:
        if delete_source_shards:
            raise PlanError(
                "--delete-source-shards deletes what files outside of --only-shards are made from: give one of them "
                "(--remote reads only what is needed)"
            )
        plan = only_shards(plan, options.shards)
    paths, read = [file.path for file in plan.files], [*source.files, *inputs]
    if options.resume and not (options.dry_run or options.force) and is_complete(plan, read):
        refuse_inputs(paths, read)
        for path in source.files if delete_source_shards else ():
            record_path(path).unlink(missing_ok=True)
        return _checked(WriteResult("finished before", paths, plan), plan, source, options, report)
    warn_on_dropped_config(source)
    for text in [*source.notes, *vocabulary_differences(source)]:
        note(f"note: {text}", detail=True)
    if not options.dry_run:
        _refuse_deleted_source(plan, source, options)
    existing = complete_files(plan) if partial_requant else set()
    if existing:
        note(f"{len(existing)} of {len(plan.files)} files exist already and stay as they are")
    deleter = None
    if delete_source_shards:
        from ...convert.hub.delete_shards import ShardDeleter

        deleter = ShardDeleter(source, plan, existing)
    if options.dry_run:
        warn(plan.warnings, detail=True)
        from ...quantize.timing import predict_seconds

        taken = forecast(
            plan,
            source,
            deleter.needed_bytes() if deleter is not None else plan.missing_bytes(existing),
            timing=(options.timing or predict_seconds) if options.is_timed else None,
            threads=options.threads,
            has_manifest=options.manifest,
            verifies=options.verify,
            left=without_files(plan, existing) if existing else None,
        )
        if options.sequential is not None:
            taken = options.sequential.added_to(taken, plan)
        if options.tuning is not None:
            taken = options.tuning.added_to(taken, plan)
        return WriteResult("planned", paths, plan, taken)
    result, hashes = _write(plan, label, source, read, options, report, existing, deleter)
    if deleter is not None:
        deleter.close()
    return _checked(result, plan, source, options, report, hashes)


def _refuse_deleted_source(plan: Plan, source: TensorSource, options: WriteOptions) -> None:
    """Raises PlanError when shards of the source were deleted by a job that this one does not continue."""
    deleted = [path for path in source.files if not path.exists() and record_path(path).exists()]
    if deleted and (options.force or not (options.resume and journal_path(plan).exists())):
        raise PlanError(
            f"{deleted[0]} was deleted by a job that used it (--delete-source-shards): resume that job (--resume), "
            "or download it again"
        )


def _write(
    plan: Plan,
    label: str,
    source: TensorSource,
    inputs: list[Path],
    options: WriteOptions,
    report: OnProgress,
    existing: Collection[int],
    deleter: ShardDeleter | None,
) -> tuple[WriteResult, WrittenHashes | None]:
    """Checks and executes the plan; also the hashes of what is written, see `Carried`. existing, deleter: see `execute`."""
    disk = deleter.needed_bytes() if deleter is not None else None
    preflight(plan, force=options.force, resume=options.resume, inputs=inputs, existing=existing, needed=disk)
    warn(plan.warnings, detail=True)
    warn(thread_notes(options.threads or 1, available_cpus()), detail=True)
    try:
        result, replaced, hashes, shares = carry_out(
            plan, label, source, options, report, inputs=inputs, existing=existing, deleter=deleter
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was finished is kept, --resume continues it") from None
    if result.resumed:
        note(f"{result.resumed} of {len(plan.outputs)} tensors were there from the interrupted job")
    made = WriteResult("written", result.paths, plan, checksums=result.checksums, resumed=result.resumed)
    made.replaced, made.shares = replaced, shares
    return made, hashes


def _checked(
    result: WriteResult,
    plan: Plan,
    source: TensorSource,
    options: WriteOptions,
    report: OnProgress,
    hashes: WrittenHashes | None = None,
) -> WriteResult:
    """The result with what options ask to be made of a finished output; hashes: of all of it, if there are any. Raises
    CheckFailed when a tensor is damaged."""
    if options.manifest:
        result.manifest = write_manifest(result.files, report, options.threads or available_cpus(), hashes)
    if options.verify:
        result.verification = verify_written(plan, source, report)
        problem = problem_line(result.verification, result.files[0])
        if problem:
            raise CheckFailed(problem, result)
    return result
