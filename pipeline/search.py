"""`ggufmill search`: the best recipe of a given size, or the smallest of a given damage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..convert import open_source
from ..formats import PlanError
from ..jobs.atomic_write import write_text
from ..quantize.recipes.recipe import load_recipe
from ..recipes import find
from .cluster.measuring import search_workers
from .common.arguments import Pattern, Size, TypeName, as_bytes, as_pattern, check_new, refuse_inputs, refuse_unused
from .common.covariance import load_covariances
from .common.importance import load_importance
from .common.losses import warn_of_losses
from .common.programs import layout_for
from .common.progress import OnProgress, reporting
from .recipe_search.options import SearchOptions, Target, parse_types
from .recipe_search.result import SearchResult
from .recipe_search.search_job import SearchJob


def search_recipe(
    model: str | Path,
    out: str | Path,
    *,
    target_size: Size | None = None,
    target_bpw: float | None = None,
    max_kld: float | None = None,
    text: str | Path | None = None,
    n_ctx: int | None = None,
    chunks: int | None = None,
    imatrix: str | Path | None = None,
    covariance: str | Path | None = None,
    effort: int | None = None,
    strict: bool = False,
    types: str | Sequence[TypeName] | None = None,
    repacked: bool = False,
    gpu: Pattern | None = None,
    gpu_size: Size | None = None,
    rules: str | Path | None = None,
    rows: int = 64,
    seed: int = 0,
    measurements: int | None = None,
    refine: int | None = None,
    state: str | Path | None = None,
    mla_layout: str | None = None,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
    program: str | None = None,
    threads: int | None = None,
    force: bool = False,
    cluster: str | None = None,
    command: str = "",
    progress: OnProgress | bool | None = None,
    **placement: Any,
) -> SearchResult:
    """Chooses a type for every weight tensor of a model, and writes the choice as a recipe.

    The damage of a type is the error of a tensor's rows, weighted by importance or by the covariance of its inputs, times the
    tensor's sensitivity: the KL divergence from the model when it alone is quantised, measured on a text.

    model         a GGUF file, a checkpoint folder or hf:OWNER/NAME
    out           the recipe to write
    target_size   bytes of the file, a number or a text such as '180G'; target_bpw: bits per weight over all tensors; max_kld:
                  KL divergence in nats, for the smallest file with at most this one. One of the three
    text          file to measure sensitivities on; n_ctx: tokens per window (512); chunks: windows of it to read (8)
    imatrix       importance matrix, GGUF or .dat
    covariance    file of covariances of the matrices' inputs (`ggufmill imatrix --covariance`): errors are those of products
                  with such inputs, of rows that are encoded with it and this effort, 0 to 3 (1). Errors of a tensor that has
                  no covariance are weighted by importance
    strict        a tensor without a covariance is refused
    types         types to choose from, as 'iq2_k,iq4_k' or a list; 'default' is the usual set
    repacked      interleaved types (_r4, _r8) where there are such, but for gpu tensors
    gpu           tensors for a GPU, a regular expression; gpu_size: a budget of their own within the target, in bytes
    rules         a recipe whose rules stay as they are; types are chosen for the other tensors
    rows, seed    of the sample of each tensor that errors are measured on
    measurements  groups of tensors whose sensitivity is measured one by one (128)
    refine        rounds of measuring around the result
    state         file for what is measured, which several recipes of a model may share; None: OUT.state.json
    mla_layout, architecture, allow_lossy_config, program  as for `convert_model`; the usual types are what the program knows
    threads       workers; None: one per processor
    force         an existing recipe is replaced
    cluster       workers measure, with the same results: tcp://HOST:PORT, a scheduler file or local:N
    command       goes into the recipe's header
    placement     settings of `load_model` that say where sensitivities are measured: device, gpu_layers and others
    progress      stages 'errors of types' in tensors, 'sensitivity' and 'refining' in groups

    Returns a `SearchResult`. Raises PlanError when the types allowed cannot reach the target or an output exists, UsageError
    for an argument that has no effect. Ctrl-C keeps what was measured: the same call continues.

    Example:
        >>> from ggufmill import search_recipe
        >>> from ggufmill.recipes import FOLDER
        >>> result = search_recipe(FOLDER / "demo", "small.txt", target_bpw=5, types="q4_0,q8_0", rows=8, force=True)
        >>> 4.9 < result.plan.bits_per_weight <= 5
        True
    """
    if text is None:
        given = {"--ctx-size": n_ctx, "--chunks": chunks, "--measurements": measurements, "--refine": refine}
        given |= {f"--{name.replace('_', '-')}": value for name, value in placement.items()}
        refuse_unused(given, "a text (-f)")
    if gpu_size is None and not repacked:
        refuse_unused({"--gpu": gpu}, "--gpu-size, or --repacked")
    if covariance is None:
        refuse_unused({"--effort": effort, "--strict": strict}, "--covariance")
    out = Path(out)
    pattern = as_pattern(gpu, "--gpu") if gpu is not None else None
    target = Target(as_bytes(target_size), target_bpw, max_kld, pattern, as_bytes(gpu_size))
    fixed = load_recipe(find(rules)) if rules is not None else None
    mla_layout = layout_for(program, model, mla_layout)
    reading = {"mla_layout": mla_layout, "architecture": architecture, "allow_lossy_config": allow_lossy_config}
    source = open_source(model, **reading)
    warn_of_losses(source)
    state_path = Path(state) if state is not None else out.with_name(out.name + ".state.json")
    if state_path.resolve() == out.resolve():
        raise PlanError(f"--state {state_path} is the output too; choose another file")
    refuse_inputs(
        [out, state_path], [*source.files, *(Path(path) for path in (imatrix, covariance, text, rules) if path is not None)]
    )
    check_new(out, force)
    given = {"n_ctx": n_ctx, "chunks": chunks, "measurements": measurements, "refine": refine}
    options = SearchOptions(
        parse_types(types, program=program),
        repacked=repacked,
        text=Path(text) if text is not None else None,
        rows=rows,
        seed=seed,
        threads=threads,
        placement=placement,
        program=program,
        **{name: value for name, value in given.items() if value is not None},
    )
    importance = load_importance(Path(imatrix), source) if imatrix is not None else None
    effort = 1 if effort is None else effort
    weights = {"importance": importance, "imatrix": imatrix, "covariance": covariance, "effort": effort}
    measuring = search_workers(cluster, model, source, reading, **weights, options=options)
    with reporting(progress) as report, measuring as workers:
        job = SearchJob(
            source,
            importance,
            options,
            covariances=load_covariances(Path(covariance), source, effort) if covariance else None,
            strict=strict,
            fixed=fixed.rules if fixed is not None else (),
            fixed_text=fixed.rules_text if fixed is not None else "",
            state=state_path,
            shared=state is not None,
            workers=workers,
            report=report,
        )
        result = job.find(target, command)
    write_text(out, result.text)
    result.out = out
    return result
