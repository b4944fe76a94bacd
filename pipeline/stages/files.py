"""Writing the files of a stage: resumed where this very plan was interrupted, by this process or by a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...convert.hub.fetch import is_repository
from ...errors import MillError
from ...jobs.atomic_write import write_text
from ...jobs.execute import JobResult, execute
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ...quantize.importance import Importance
from ...quantize.recipes.recipe import Recipe
from ..cluster.call import ClusterCall, cluster_call
from ..cluster.measuring import SearchWorkers, search_workers
from ..cluster.writing import cluster_writer
from ..common.adapters import adapters_of_recipe
from ..common.covariance import effort_of_recipe
from ..common.progress import Stage
from ..writing.checks import watch_inputs

if TYPE_CHECKING:
    from .quant import Quant


def reading_of(recipe: Recipe, base: Path, model: str | Path, mla_layout: str | None, cluster: str | None) -> dict[str, Any]:
    """Arguments of `open_source` for a run's model. base: what the recipe's paths are relative to."""
    convert = recipe.stages.get("convert", {})
    return {
        "mla_layout": mla_layout,
        "mtp": convert.get("mtp"),
        "vocab": convert.get("vocab", True),
        "architecture": convert.get("architecture"),
        "allow_lossy_config": convert.get("allow_lossy_config", False),
        "lora": adapters_of_recipe(recipe, base),
        "remote": cluster is not None and is_repository(model),  # every worker reads what it needs, and this process too
    }


def measuring_on(
    quant: Quant, address: str | None, importance: Importance | None
) -> AbstractContextManager[SearchWorkers | None]:
    """The workers of a cluster that measure for a quant's search; without an address None."""
    run = quant.run
    weights = {"importance": importance, "imatrix": run.imatrix_path if quant.with_imatrix else None}
    weights |= {"covariance": quant.covariance, "effort": effort_of_recipe(quant.recipe), "options": quant.search_options}
    return search_workers(address, run.model, run.source, run.reading, **weights)


def quantize_call(quant: Quant, address: str, output: str | None) -> ClusterCall:
    """The call of `quantize_model` by which workers make the plan of a quant."""
    run, recipe = quant.run, quant.recipe
    path = quant.folder.recipe if quant.target is not None else run.path
    if recipe.label and quant.target is None:
        path = quant.folder.path / f"{quant.folder.stem}.toml"
        write_text(path, recipe.text)
    arguments = {
        "source": run.model,
        "out": quant.folder.gguf,
        "recipe": path,
        "imatrix": run.imatrix_path if quant.with_imatrix else None,
        "covariance": quant.covariance,
        "effort": effort_of_recipe(recipe) if quant.covariance is not None else None,
        "split_max_size": recipe.split_max_size,
        "program": quant.program,
        "allow_requantize": "outtype" in recipe.stages.get("convert", {}),
        "allow_nonfinite": run.allow_nonfinite,
        **run.reading,
        "cluster": address,
        "cluster_output": output,
    }
    call = cluster_call("quantize_model", {**arguments, "threads": None, "delete_source_shards": False})
    assert call is not None  # an address is given
    return call


def write_files(
    quant: Quant, plan: Plan, label: str, inputs: Sequence[Path], call: ClusterCall | None = None
) -> tuple[JobResult, list[tuple[str, int]]]:
    """Continues from a journal of this very plan; one of an earlier recipe in this folder is replaced.

    Returns the result, and what workers have written as 0 (tensor, weights).
    """
    run, journal = quant.run, journal_path(plan)
    first_line = journal.read_bytes().partition(b"\n")[0] if journal.exists() and not run.fresh else b""
    resume = plan.fingerprint.encode() in first_line
    for stage in ("verify", "checksums"):
        run.cache.forget(quant.stage_name(stage))
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
