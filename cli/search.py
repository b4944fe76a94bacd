"""`ggufmill search` finds types for a size."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from .command import Verb
from .display.console import call
from .display.plans import histogram_text, totals_text
from .options import devices, flags
from .options.settings import N_CTX
from .options.types import OUT_FILE, REGEX, SIZE, TEXT, Source

if TYPE_CHECKING:
    from ..pipeline.recipe_search.result import SearchResult


def _recipe_name(ctx: click.Context, param: click.Parameter, out: Any) -> Any:
    if out.suffix == ".gguf":
        raise click.BadParameter(f"{out} is named like a model; what is written is a recipe, such as {out.with_suffix('.txt')}")
    return out


@click.command(cls=Verb)
@click.argument("model", type=Source())
@click.argument("out", type=OUT_FILE, callback=_recipe_name)
@flags.target
@click.option("-f", "--file", "text", type=TEXT, help="Text to measure sensitivity on.")
@click.option("-c", "--ctx-size", "n_ctx", type=N_CTX, help="Window in tokens. [default: 512]")
@click.option("--chunks", type=click.IntRange(1), help="Windows of the text to read. [default: 8]")
@flags.imatrix
@flags.covariance
@click.option("--strict", is_flag=True, help="Refuse a tensor whose errors --covariance cannot weight.")
@flags.types
@click.option("--repacked", is_flag=True, help="Interleaved types (_R4, _R8) where there are such, but for --gpu tensors.")
@click.option("--gpu", metavar="REGEX", type=REGEX, help="Tensors for a GPU: their rows stay plain.")
@click.option("--gpu-size", type=SIZE, metavar="SIZE", help="A budget of their own for --gpu tensors, within the target.")
@click.option("--rules", metavar="FILE", help="A recipe whose rules stay as they are; types are chosen for the other tensors.")
@click.option("--rows", type=click.IntRange(8), default=64, show_default=True, help="Rows per tensor that errors come from.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Picks the rows.")
@click.option(
    "--measurements",
    type=click.IntRange(1),
    help="Groups of tensors whose sensitivity is measured one by one: each tensor, or roles by bands of layers. [default: 128]",
)
@click.option("--refine", type=click.IntRange(0), help="Rounds of measuring around the result. [default: 0]")
@click.option("--state", type=OUT_FILE, help="Keep what is measured in this file. [default: OUT.state.json]")
@flags.mla_layout
@flags.reading
@flags.program
@devices.placement
@flags.threads
@flags.cluster
@flags.force
@flags.as_json
def command(model: Any, out: Any, as_json: bool, placement: dict[str, Any], **options: Any) -> None:
    """Choose a type for every weight tensor of MODEL (a GGUF or a Hugging Face folder) and write them to OUT as a recipe.

    The damage of a type is the error of a tensor's rows times the tensor's sensitivity: the KL divergence from MODEL when it
    alone is quantised, measured on the text of -f. Errors are weighted by importance; with --covariance they are errors of
    matrix products, of rows that are encoded as `quantize --covariance --effort` does it. What is measured is kept in
    OUT.state.json, or in the file of --state, which several OUTs may share: an interrupted search goes on, and for another
    target of the same model with the same options only what it finds is measured (--max-kld and --refine: what is tried on the
    way).

    \b
    Examples:
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 -f calibration.txt --imatrix model.imatrix
      ggufmill search model-bf16.gguf large.txt --target-bpw 5 -f calibration.txt --state measured.json
      ggufmill search DeepSeek-V3/ v3.txt --target-size 180G --imatrix v3.imatrix --repacked --gpu "attn|shexp" --gpu-size 17G
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 -f calibration.txt --covariance model.cov --effort 1
      ggufmill search model-bf16.gguf good.txt --max-kld 0.02 -f calibration.txt
    """
    from ..pipeline.search import search_recipe

    def text(result: SearchResult) -> str:
        return _text(result, ["ggufmill", "quantize", str(model), "OUT.gguf", "--recipe", str(out)], options)

    typed = "ggufmill " + shlex.join(sys.argv[1:])
    call(search_recipe, model, out, show=text, as_json=as_json, command=typed, **options, **placement)


def _text(result: SearchResult, words: list[str], options: dict[str, Any]) -> str:
    """Types, totals and divergence, and the command that quantises by the recipe."""
    parts, measured = [histogram_text(result.plan), totals_text(result.plan)], result.measured
    if measured is not None:
        parts.append(
            f"KL divergence: predicted {result.assignment.predicted:.4g}, measured {measured.mean:.4g} ± {measured.error:.2g}"
        )
    for name in ("imatrix", "covariance", "effort", "mla_layout", "architecture"):
        words += [f"--{name.replace('_', '-')}", str(options[name])] if options[name] is not None else []
    words += ["--allow-lossy-config"] if options["allow_lossy_config"] else []
    words += ["--allow-requantize"] if result.requantizes else []
    return "\n\n".join([*parts, f"{result.out}: {shlex.join(words)}"])
