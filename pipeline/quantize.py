"""`ggufmill quantize`: a model is written in other types, by a recipe, a file type, or to a target size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..jobs.atomic_write import write_text
from ..jobs.preflight import preflight
from ..jobs.shards import parse_shards
from .cluster.call import cluster_call
from .common.arguments import as_adapters, as_file_type, refuse_inputs
from .common.encoder_device import describe_coupled_rows
from .common.messages import note
from .common.progress import OnProgress, reporting
from .planning import Quantization, plan_of, refuse_without_effect
from .recipe_search.options import SearchTarget
from .requests.quantize import QuantizeRequest
from .requests.verb import verb
from .writing.write_model import WriteResult, finished_without_source, write_model
from .writing.write_options import WriteOptions, write_options

if TYPE_CHECKING:
    from .common.forecast import Forecast


@verb(QuantizeRequest)
def quantize_model(request: QuantizeRequest) -> WriteResult:
    """Quantises a model. The first matching rule wins; a rule is searched for anywhere in a tensor's name.

    With a target (target_size, target_bpw, max_kld) the types of tensors that no rule takes are searched for, as
    `search_recipe` does it, and the recipe is written to OUT.recipe.txt. Progress: stage 'quantize' in bytes; before it those
    of `search_recipe`, after it 'checksums' and 'verify'.

    Returns a `WriteResult`. Raises as `convert_model` does, RecipeError for a recipe that cannot be read, UsageError for
    arguments that exclude each other or have nothing to act on.

    Example:
        >>> from ggufmill import quantize_model
        >>> from ggufmill.recipes import FOLDER
        >>> result = quantize_model(FOLDER / "demo", "demo.gguf", "q8_0", custom_q="exps=q4_0", force=True)
        >>> {name: count for name, (count, nbytes) in result.plan.histogram().items()}
        {'q8_0': 42, 'q4_0': 9, 'f32': 23}
    """
    call = cluster_call(plan_of, request)
    job, out = Quantization(request), Path(request.out)
    asked, request, recipe = request, job.request, job.given.recipe
    options = write_options(asked, shards=parse_shards(asked.only_shards) if asked.only_shards is not None else None)
    encoder = job.device
    if asked.delete_source_shards:
        named = as_file_type(asked.type, "TYPE") or recipe.type
        lora, text = as_adapters(request.lora), job.given.text
        earlier = finished_without_source(request.source, out, request.mla_layout, options, named, text, lora)
        if earlier is not None:
            return earlier
    _check(job, options)
    call = call.resolved(job.request if job.covariances is not None else replace(job.request, effort=None)) if call else None
    inputs, text = job.files, None
    sequential = None
    if request.sequential is not None:
        from .writing.sequential import sequential_encoding

        sequential = sequential_encoding(request, job.source, job.device)
    with reporting(asked.progress) as report:
        searching = None
        if job.target is not None:
            text, searching = _searched(job, job.target, options, inputs, report)
            call = call.with_found(text) if call is not None else None
        plan = job.plan(text)
        if text is not None:
            from .recipe_search.result import name_recipe_in_warnings

            name_recipe_in_warnings(plan)
            if not asked.dry_run and (asked.force or not plan.files[0].path.exists()):
                write_text(_beside(out, ".recipe.txt"), text)
        describe_coupled_rows(plan, encoder)
        if sequential is not None:
            sequential.describe(plan)
        is_timed, timing = not asked.no_timing and encoder is None, None
        if job.covariances is not None and is_timed:
            from ..quantize.covariance.timing import predict_seconds_with

            timing = partial(predict_seconds_with, job.covariances, job.source)
        result = write_model(
            plan,
            "quantize",
            job.source,
            replace(options, cluster=call, sequential=sequential, is_timed=is_timed, timing=timing),
            report,
            inputs=inputs,
            delete_source_shards=asked.delete_source_shards,
            partial_requant=asked.partial_requant,
        )
        if result.forecast is not None and searching is not None and is_timed:
            result.forecast = result.forecast.with_stage("search", searching())
        return result


def _check(job: Quantization, options: WriteOptions) -> None:
    """Opens what the job reads. Raises UsageError for arguments without effect, PlanError for a job that cannot be done."""
    asked, target = job.asked, job.target
    _ = job.source, job.importance, job.covariances
    present = {"has_covariance": job.covariances is not None, "has_sequence": job.request.sequential is not None}
    refuse_without_effect(asked, has_target=target is not None, **present)
    if target is not None and options.shards is not None:
        raise PlanError(
            "--only-shards divides a job whose types are known: find them once with `ggufmill search`, and give the recipe"
        )
    if target is not None and (asked.pure or job.has_types):
        raise PlanError("a target leaves no room for a TYPE or types of roles: give rules (--custom-q) for what is fixed")
    asks = job.has_types or job.types[1] or target is not None or job.metadata or asked.prune_layers is not None
    if not asks:
        raise PlanError("nothing to quantise to: give a TYPE such as Q4_K_M, --recipe, --custom-q or --target-size")


def _searched(
    job: Quantization, target: SearchTarget, options: WriteOptions, inputs: list[Path], report: OnProgress
) -> tuple[str, Callable[[], Forecast] | None]:
    """The text of the recipe that is searched for, and with a dry run what says what that takes. inputs: gets the text that is
    measured on; a dry run does not read it, so that types are those of the least errors."""
    # a search runs models, whose kernels take half a second to import: without a target they are not
    from .cluster.measuring import search_workers
    from .recipe_search.search_job import SearchJob

    asked, search = job.asked, job.search_options(job.asked.threads)
    inputs += [search.text] if search.text is not None else []
    if options.dry_run:
        from .recipe_search.forecast import search_forecast

        if search.text is not None:
            note("note: what is measured on a text decides the types: those of the plan are a guess by errors alone")
        whole = SearchJob(job, search, report=report)
        guess = SearchJob(job, replace(search, text=None), report=report)
        return guess.find(target).text, lambda: search_forecast(whole, Path(asked.out).parent).forecast
    changed = asked.prune_layers or asked.include_weights or asked.exclude_weights
    if changed and asked.cluster is not None:
        note("note: --prune-layers, --include-weights and --exclude-weights: types are measured here, not by workers")
    out = Path(asked.out)
    with search_workers(None if changed else asked.cluster, job, search) as workers:
        measured = SearchJob(job, search, state=_beside(out, ".state.json"), workers=workers, report=report)
        read = [*job.source.files, *inputs]
        refuse_inputs([_beside(out, ".recipe.txt"), _beside(out, ".state.json")], read)
        plan, disk = measured.smallest_plan(target, out), measured.largest_file(target)
        again = options.resume and measured.measurements.errors  # the output may be this job's, which is known by its recipe
        preflight(plan, force=bool(options.force or again), resume=options.resume, inputs=read, needed=disk)
        return measured.find(target).text, None


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)
