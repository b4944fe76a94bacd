"""`ggufmill search`: the best recipe of a given size, or the smallest of a given error."""

from __future__ import annotations

from pathlib import Path

from ..errors import PlanError
from ..jobs.atomic_write import write_text
from ..recipes import find_text
from ..request_fields import shared, values_of
from ..runtime.settings import PlacementOptions
from .cluster.measuring import search_workers
from .common.arguments import check_new, refuse_inputs, refuse_unused
from .common.dropped_config import warn_on_dropped_config
from .common.forecast import Planned
from .common.progress import reporting
from .planning import Quantization
from .recipe_search.forecast import search_forecast
from .recipe_search.options import parse_target, parse_types, search_options
from .recipe_search.result import SearchResult
from .recipe_search.search_job import SearchJob
from .requests.groups import moments_of
from .requests.quantize import QuantizeRequest
from .requests.search import SearchRequest
from .requests.verb import verb


@verb(SearchRequest)
def search_recipe(request: SearchRequest) -> SearchResult | Planned:
    """Chooses a type for every weight tensor of a model, and writes the choice as a recipe.

    The error of a type is that of a tensor's rows, weighted by importance or by the covariance of its inputs, times the
    tensor's sensitivity: the KL divergence from the model when it alone is quantised, measured on a text. Errors of a tensor
    that has no covariance are weighted by importance. With curvature an error is a predicted divergence, and needs no text.

    Returns a `SearchResult`, with dry_run a `Planned`. Raises PlanError when the types allowed cannot reach the target or an
    output exists, UsageError for an argument that has no effect. Ctrl-C keeps what was measured: the same call continues.

    Example:
        >>> from ggufmill import search_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> result = search_recipe(FOLDER / "demo", "small.txt", target_bpw=5, types="q4_0,q8_0", rows=8, force=True)
        >>> 4.9 < result.plan.bits_per_weight <= 5
        True
    """
    placed = _placement(request)
    _refuse_without_effect(request, placed)
    out, state = Path(request.out), Path(request.state) if request.state is not None else None
    target = parse_target(request, request)
    if target is None:
        raise PlanError("a search needs one target: --target-size, --target-bpw or --max-kld")
    job = Quantization(_as_quantization(request), is_written=False)
    job.threads, job.is_searched = request.threads, True
    warn_on_dropped_config(job.source)
    state_path = state or out.with_name(out.name + ".state.json")
    if state_path.resolve() == out.resolve():
        raise PlanError(f"--state {state_path} is the output too; choose another file")
    texts = [find_text(request.text)] if request.text is not None else []
    refuse_inputs([out, state_path], [*job.source.files, *job.files, *texts])
    check_new(out, request.force or request.dry_run)
    types, program = parse_types(request.types, program=job.request.program), job.request.program
    options = search_options(request, types, threads=request.threads, placement=placed, program=program)
    if request.dry_run:
        search = SearchJob(job, options, state=state_path, shared=state is not None)
        search.smallest_plan(target)  # raises for a target that cannot be reached
        return search_forecast(search, out.parent)
    with reporting(request.progress) as report, search_workers(request.cluster, job, options) as workers:
        search = SearchJob(job, options, state=state_path, shared=state is not None, workers=workers, report=report)
        result = search.find(target, request.command)
    write_text(out, result.text)
    result.out = out
    return result


def _placement(request: SearchRequest) -> dict[str, object]:
    """The settings of `load_model` that say where sensitivities are measured: those that were given."""
    usual = values_of(PlacementOptions())
    return {name: value for name, value in values_of(request, PlacementOptions).items() if value != usual[name]}


def _refuse_without_effect(request: SearchRequest, placed: dict[str, object]) -> None:
    """Raises UsageError for an argument that has nothing to act on."""
    if request.text is None:
        refuse_unused(request, "a text (-f)", "n_ctx", "chunks", "measurements", "refine", *placed)
    if request.gpu_size is None and not request.repacked:
        refuse_unused(request, "--gpu-size, or --repacked", "gpu")
    if moments_of(request) is None:
        refuse_unused(request, "--covariance or --curvature", "effort", "strict")


def _as_quantization(request: SearchRequest) -> QuantizeRequest:
    """What the recipe is for: types for the tensors that the rules leave, whatever they are stored in. The target is the
    search's own, not that of a recipe that gives the rules."""
    searched = dict.fromkeys(("target_size", "target_bpw", "max_kld", "types", "cluster", "threads", "progress"))
    fixed = {"out": "out.gguf", "recipe": request.rules, "ignore_imatrix_rules": True, "allow_requantize": True}
    return shared(request, QuantizeRequest, source=request.model, **searched, **fixed)
