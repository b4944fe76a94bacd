"""What is there already of a collection of importance data: what may be written, and what was finished before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import PlanError
from ...formats.file_range import PIPED_TEXTS
from ...imatrix import Imatrix, load
from ...imatrix.calibration import Calibration
from ...imatrix.collect_state import state_path
from ..common.arguments import check_folder, refuse_inputs


def check_outputs(out: Path | None, plot: str | Path | None, inputs: Sequence[Path], resume: bool, force: bool) -> None:
    """Raises PlanError for outputs that must not be written, among them OUT.state.

    With `resume` the output may exist: `already_collected` looks at it when the windows are known.
    """
    written = [out, state_path(out)] if out is not None else []
    refuse_inputs([*written, *([Path(plot)] if plot else [])], inputs)
    if out is None:
        return
    if out.exists() and not (resume or force):
        raise PlanError(f"{out} exists; use --force to replace it")
    if state_path(out).exists() and not (resume or force):
        raise PlanError(f"{state_path(out)} is left from an interrupted run; --resume continues it, --force starts over")
    check_folder(out)


def already_collected(
    out: Path | None, covariance: Path | None, windows: Calibration, before: Sequence[Imatrix]
) -> Imatrix | None:
    """The importance matrix of a job that was finished before: the file `out`, if it exists and is of these windows.

    before: what was to be added. Raises PlanError if it exists and is of others, or the covariance is missing.
    """
    if out is None or not out.exists():
        return None
    there = load(out)
    chunks = windows.weighted_count(len(windows.windows)) + sum(one.chunk_count for one in before)
    same_size = out.suffix == ".dat" or there.chunk_size == windows.n_ctx
    same_texts = set(windows.datasets) <= set(there.datasets)
    if there.chunk_count != chunks or not same_size or not same_texts:
        raise PlanError(f"{out} exists, is of other texts or windows, and nothing can be resumed; use --force to replace it")
    piped = next((name for name in windows.datasets if name in PIPED_TEXTS), None)
    if piped is not None:
        raise PlanError(f"{out} exists, and whether it is of what {piped} holds now is not known; use --force to replace it")
    if covariance is not None and not covariance.exists():
        raise PlanError(f"{out} is complete, but {covariance} does not exist; use --force to collect both")
    return there
