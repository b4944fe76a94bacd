"""`ggufmill search` finds types for a size."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.figures import DIVERGENCE_DIGITS, error_text
from ..pipeline.requests.groups import SourceOptions, Weighting
from ..pipeline.requests.search import SearchRequest
from ..request_fields import words_of
from .command import Verb
from .display.console import call
from .display.plans import histogram_text, totals_text
from .options.fields import options_of
from .options.types import OUT_FILE

if TYPE_CHECKING:
    from ..pipeline.recipe_search.result import SearchResult


def _recipe_name(ctx: click.Context, param: click.Parameter, out: Any) -> Any:
    if out.suffix == ".gguf":
        raise click.BadParameter(f"{out} is named like a model; what is written is a recipe, such as {out.with_suffix('.txt')}")
    return out


@click.command(cls=Verb)
@options_of(SearchRequest, out={"type": OUT_FILE, "callback": _recipe_name})
def command(**options: Any) -> None:
    """Choose a type for every weight tensor of MODEL (a GGUF or a Hugging Face folder) and write them to OUT as a recipe.

    The loss of a type is the error of a tensor's rows times the tensor's sensitivity: the KL divergence from MODEL when it
    alone is quantised, measured on the text of -f. Errors are weighted by importance; with --covariance they are errors of
    matrix products, of rows that are encoded as `quantize --covariance --effort` does it. With --curvature they are predicted
    KL divergences, which need no text. What is measured is kept in OUT.state.json, or in the file of --state, which several
    OUTs may share: an interrupted search resumes, and a search for another target of the same model with the same options
    measures only the recipe that it finds (with --max-kld or --refine also those that it tries on the way).

    \b
    Examples:
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 -f calibration.txt --imatrix model.imatrix
      ggufmill search model-bf16.gguf large.txt --target-bpw 5 -f calibration.txt --state measured.json
      ggufmill search DeepSeek-V3/ v3.txt --target-size 180G --imatrix v3.imatrix --repacked --gpu "attn|shexp" --gpu-size 17G
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 -f calibration.txt --covariance model.cov --effort 1
      ggufmill search model-bf16.gguf small.txt --target-bpw 3.2 --imatrix model.imatrix --curvature model.curv
      ggufmill search model-bf16.gguf good.txt --max-kld 0.02 -f calibration.txt
    """
    from ..pipeline.search import search_recipe

    def text(result: SearchResult) -> str:
        words = ["ggufmill", "quantize", str(options["model"]), "OUT.gguf", "--recipe", str(options["out"])]
        return _text(result, words, options)

    typed = "ggufmill " + shlex.join(sys.argv[1:])
    call(search_recipe, show=text, command=typed, **options)


def _text(result: SearchResult, words: list[str], options: dict[str, Any]) -> str:
    """Types, totals and divergence, and the command that quantises by the recipe."""
    parts, measured = [histogram_text(result.plan), totals_text(result.plan)], result.measured
    if measured is not None:
        figure = error_text(measured.mean, measured.error, DIVERGENCE_DIGITS)
        parts.append(f"KL divergence: predicted {result.assignment.predicted:.{DIVERGENCE_DIGITS}f}, measured {figure}")
    for group in (Weighting, SourceOptions):
        words += words_of(group, options)
    words += ["--allow-requantize"] if result.requantizes else []
    return "\n\n".join([*parts, f"{result.out}: {shlex.join(words)}"])
