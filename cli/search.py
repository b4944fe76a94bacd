"""`ggufmill search` finds types for a size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click

from .options import flags
from .unused_options import refuse_idle

_TEXT, _SPLIT = "a text (-f)", "--gpu-size, or --repacked"
_NEEDS = {"n_ctx": _TEXT, "chunks": _TEXT, "measurements": _TEXT, "refine": _TEXT, "gpu": _SPLIT}


@click.command(short_help="Find the best recipe of a given size")
@click.argument("model", type=flags.SourceName())
@click.argument("out", type=flags.OUT_FILE)
@flags.target_size
@flags.target_bpw
@flags.max_kld
@click.option("-f", "--file", "text", type=flags.FILE, help="Text to measure sensitivity on.")
@flags.ctx
@click.option("--chunks", type=click.IntRange(1), default=8, show_default=True, help="Windows of the text to read.")
@flags.imatrix
@flags.types
@click.option("--repacked", is_flag=True, help="Interleaved types (_R4, _R8) where there are such, but for --gpu tensors.")
@click.option("--gpu", metavar="REGEX", type=flags.REGEX, help="Tensors for a GPU: their rows stay plain.")
@click.option("--gpu-size", type=flags.SIZE, metavar="SIZE", help="A budget of their own for --gpu tensors, within the target.")
@click.option("--rules", metavar="FILE", help="A recipe whose rules stay as they are; types are chosen for the other tensors.")
@click.option("--rows", type=click.IntRange(8), default=64, show_default=True, help="Rows per tensor that errors come from.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Picks the rows.")
@click.option(
    "--measurements",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Groups of tensors whose sensitivity is measured one by one: each tensor, or roles by bands of layers.",
)
@click.option(
    "--refine", type=click.IntRange(0), default=0, show_default=True, help="Rounds of measuring around what is found."
)
@click.option("--state", type=flags.OUT_FILE, help="Keep what is measured in this file. [default: OUT.state.json]")
@flags.mla_layout
@flags.threads
@flags.force
@flags.as_json
def command(
    model: str | Path,
    out: Path,
    target_size: int | None,
    target_bpw: float | None,
    max_kld: float | None,
    types: str | None,
    imatrix: Path | None,
    gpu: re.Pattern[str] | None,
    gpu_size: int | None,
    rules: str | None,
    state: Path | None,
    mla_layout: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose a type for every weight tensor of MODEL (a GGUF or a Hugging Face folder) and write them to OUT as a recipe.

    The damage of a type is the importance-weighted error of a tensor's rows times the tensor's sensitivity: the KL divergence
    from MODEL when it alone is quantised, measured on the text of -f. What is measured is kept in OUT.state.json, or in the
    file of --state, which several OUTs may share: an interrupted search goes on, and for another target of the same model with
    the same options only what it finds is measured (--max-kld and --refine: what is tried on the way).

    \b
    Examples:
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 -f calibration.txt --imatrix model.imatrix
      ggufmill search model-bf16.gguf large.txt --target-bpw 5 -f calibration.txt --state measured.json
      ggufmill search DeepSeek-V3/ v3.txt --target-size 180G --imatrix v3.imatrix --repacked --gpu "attn|shexp" --gpu-size 17G
      ggufmill search model-bf16.gguf good.txt --max-kld 0.02 -f calibration.txt
    """
    from ..convert import open_source
    from ..formats import PlanError
    from ..jobs.atomic_write import write_text
    from ..pipeline.console import emit
    from ..pipeline.importance import load_importance
    from ..pipeline.search_options import Target, Wishes, parse_types
    from ..pipeline.searching import SearchJob, command_line
    from ..pipeline.write_model import check_new, histogram_text, protect, totals_text
    from ..quantize.recipes.recipe import load_recipe
    from ..recipes import find

    refuse_idle(_NEEDS, {_TEXT: options["text"] is not None, _SPLIT: gpu_size is not None or options["repacked"]})
    target = Target(target_size, target_bpw, max_kld, gpu, gpu_size)
    fixed = load_recipe(find(rules)) if rules is not None else None
    source = open_source(model, mla_layout=mla_layout)
    kept = state or out.with_name(out.name + ".state.json")
    if kept.resolve() == out.resolve():
        raise PlanError(f"--state {kept} is the output too; choose another file")
    protect([out, kept], [*source.files, *(Path(p) for p in (imatrix, options["text"], rules) if p is not None)])
    check_new(out, force)
    job = SearchJob(
        source,
        load_importance(imatrix, source, quiet=as_json) if imatrix is not None else None,
        Wishes(parse_types(types), **options),
        fixed=fixed.rules if fixed is not None else (),
        fixed_text=fixed.rules_text if fixed is not None else "",
        state=kept,
        shared=state is not None,
    )
    result = job.find(target, command_line())
    write_text(out, result.text)

    def text() -> str:
        measured = result.measured
        lines = [histogram_text(result.plan), totals_text(result.plan)]
        if measured is not None:
            lines.append(
                f"KL divergence: predicted {result.found.predicted:.4g}, measured {measured.mean:.4g} ± {measured.error:.2g}"
            )
        words = ["ggufmill", "quantize", str(model), "OUT.gguf", "--recipe", str(out)]
        words += ["--imatrix", str(imatrix)] if imatrix is not None else []
        words += ["--mla-layout", mla_layout] if mla_layout is not None else []
        words += ["--allow-requantize"] if job.requantises(result.text) else []
        return "\n\n".join([*lines, f"{out}: {shlex.join(words)}"])

    emit({"out": str(out), "target": target.text, **result.as_json()}, as_json, text)
