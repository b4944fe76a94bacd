"""Writing the files of a stage: resumed where this very plan was interrupted, by this process or by a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ...convert.hub.fetch import is_repository
from ...errors import MillError, PlanError
from ...jobs.execute import JobResult, execute
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ..cluster.call import ClusterCall, cluster_call
from ..cluster.writing import cluster_writer
from ..common.covariance import effort_of_recipe
from ..common.progress import Stage
from ..writing.checks import watch_inputs

if TYPE_CHECKING:
    from .run import Run


def quantize_call(run: Run, address: str, output: str | None) -> ClusterCall:
    """The call of `quantize_model` by which workers make the plan of a run's quantize stage.

    Raises PlanError for a source that workers would read otherwise than this process.
    """
    if is_repository(run.model):
        raise PlanError(f"{run.recipe.name}: --cluster needs [source] model in a folder that all machines see, not {run.model}")
    arguments = {
        "source": run.model,
        "out": run.folder.gguf,
        "recipe": run.folder.recipe if run.target is not None else run.path,
        "imatrix": run.imatrix_path,
        "covariance": run.covariance,
        "effort": effort_of_recipe(run.recipe) if run.covariance is not None else None,
        "split_max_size": run.recipe.split_max_size,
        "allow_requantize": "outtype" in run.recipe.stages.get("convert", {}),
        "allow_nonfinite": run.allow_nonfinite,
        **run.reading,
        "cluster": address,
        "cluster_output": output,
    }
    call = cluster_call("quantize_model", {**arguments, "threads": None, "delete_source_shards": False})
    assert call is not None  # an address is given
    return call


def write_files(
    run: Run, plan: Plan, label: str, inputs: Sequence[Path], call: ClusterCall | None = None
) -> tuple[JobResult, list[tuple[str, int]]]:
    """Continues from a journal of this very plan; one of an earlier recipe in this folder is replaced.

    Returns the result, and what workers have written as 0 (tensor, weights).
    """
    journal = journal_path(plan)
    first_line = journal.read_bytes().partition(b"\n")[0] if journal.exists() and not run.fresh else b""
    resume = plan.fingerprint.encode() in first_line
    run.cache.forget("verify")
    try:
        with nullcontext() if call is None else cluster_writer(call, plan, run.source) as writer:
            result = execute(
                plan,
                threads=run.threads,
                resume=resume,
                force=not resume,
                progress=Stage(run.report, label, plan.total_bytes).advance,
                verify_inputs=watch_inputs([path for path in inputs if path.exists()]),
                write=writer,
            )
            return result, writer.replaced if writer is not None else []
    except MillError as error:
        cause = error.__cause__
        if isinstance(cause, MillError):  # of one tensor; the finished ones stay
            raise MillError(f"{cause}; {run.how_to_continue}") from error
        if isinstance(cause, OSError):
            raise MillError(f"{plan.files[0].path}: {cause.strerror or cause}; {run.how_to_continue}") from error
        raise
