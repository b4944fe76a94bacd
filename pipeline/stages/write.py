"""Writing the files of a plan within a run, so that the same command continues what was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...formats import MillError, TensorSource
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ..cluster.call import ClusterCall
from ..common.progress import OnProgress
from ..requests.run import RunRequest
from ..writing.carry_out import carry_out
from ..writing.write_options import WriteOptions

if TYPE_CHECKING:
    from ..writing.sequential import SequentialEncoding


def write_plan(
    plan: Plan,
    label: str,
    source: TensorSource,
    inputs: Sequence[Path],
    request: RunRequest,
    report: OnProgress,
    how_to_continue: str,
    call: ClusterCall | None = None,
    sequential: SequentialEncoding | None = None,
) -> int:
    """Writes the files of a plan, continuing from a journal of this very plan; one of an earlier recipe in this folder is
    replaced. Returns the number of tensors that were there. Raises MillError, which ends in `how_to_continue`."""
    journal = journal_path(plan)
    first_line = journal.read_bytes().partition(b"\n")[0] if journal.exists() and not request.force else b""
    resume = plan.fingerprint.encode() in first_line
    threads = request.threads
    options = WriteOptions(resume=resume, force=not resume, threads=threads, cluster=call, sequential=sequential)
    there = [path for path in inputs if path.exists()]
    try:
        return carry_out(plan, label, source, options, report, inputs=there).job.resumed
    except MillError as error:
        cause = error.__cause__
        if isinstance(cause, MillError):  # of one tensor; the finished ones stay
            raise MillError(f"{cause}; {how_to_continue}") from error
        if isinstance(cause, OSError):
            raise MillError(f"{plan.files[0].path}: {cause.strerror or cause}; {how_to_continue}") from error
        raise
