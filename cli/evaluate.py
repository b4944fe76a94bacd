"""`ggufmill evaluate` judges many quants of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import Verb
from .display.console import call, table
from .options import flags
from .options.settings import run_options
from .options.types import FILE, MODEL, TEXT

if TYPE_CHECKING:
    from ..pipeline.evaluate import Evaluation


@click.command(cls=Verb)
@click.argument("models", nargs=-1, metavar="[MODEL|FOLDER|PATTERN]...", type=click.Path(path_type=Path))
@click.option("--against", required=True, metavar="BASE", type=MODEL, help="The baseline, or a file of its predictions.")
@click.option("-f", "--file", "text", type=TEXT, help="Text to read. [default: the tokens in the baseline's file]")
@run_options(n_ctx=512, in_windows=True)
@flags.chunks
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="evaluation",
    show_default=True,
    help="Folder for results.json, table.md, plot.png and the baseline's outputs.",
)
@click.option("--stock", metavar="T,T,...", default="", help="Judge these file types of BASE too, without writing them.")
@click.option("--imatrix", type=FILE, help="Importance matrix for --stock, GGUF or .dat.")
@click.option("--join", type=FILE, multiple=True, metavar="RESULTS", help="Add what another call measured on the same text.")
@click.option("--no-plot", is_flag=True, help="Draw nothing; the picture needs matplotlib.")
@flags.as_json
def command(models: tuple[Path, ...], as_json: bool, settings: dict[str, Any], **options: Any) -> None:
    """Size, perplexity, KL divergence, same top token and speed of many quants, in one table and one picture.

    A folder stands for the GGUF files in it. What was measured is kept in the output folder: the same call goes on after an
    interruption, and a model is measured again only when it, the text, the baseline or a setting has changed.

    \b
    Examples:
      ggufmill evaluate quants/ --against model-bf16.gguf -f wiki.test.raw --chunks 40 -o judged
      ggufmill evaluate new.gguf --against model-bf16.gguf -f wiki.test.raw --chunks 40 -o today --join judged/results.json
      ggufmill evaluate "quants/*iq*.gguf" --against model-bf16.gguf -f wiki.test.raw --stock Q4_K_M,Q3_K_M --imatrix i.gguf
    """
    from ..pipeline.evaluate import evaluate_models

    call(evaluate_models, models, show=_text, as_json=as_json, **options, **settings)


def _text(result: Evaluation) -> str:
    from ..pipeline.reports.evaluation import HEADINGS, cells

    baseline = result.baseline
    lines = [
        f"baseline {baseline['path']}" + (f", perplexity {baseline['perplexity']:.4f}" if "perplexity" in baseline else "")
    ]
    lines += ["", table(HEADINGS, [cells(row) for row in result.rows]), ""]
    lines += [f"failed: {model}: {reason}" for model, reason in result.failed.items()]
    return "\n".join([*lines, *(f"wrote {path}" for path in result.files.values())])
