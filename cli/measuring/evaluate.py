"""`ggufmill evaluate` judges many quants of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.requests.measure import EvaluateRequest
from ..command import Verb
from ..display.console import call, table
from ..options.fields import options_of

if TYPE_CHECKING:
    from ...pipeline.measuring.evaluate import Evaluation


@click.command(cls=Verb)
@options_of(EvaluateRequest, models={"nargs": -1, "type": click.Path(path_type=Path), "required": False})
def command(**options: Any) -> None:
    """Measure size, perplexity, KL divergence, same top token and speed of many quants, in one table and one picture.

    A folder stands for the GGUF files in it. What was measured is kept in the output folder: the same call resumes after an
    interruption, and a model is measured again only when it, the text, the baseline or a setting has changed.

    With --tasks the models, and the baseline, answer questions greedily, each as the only message of its chat template: how
    many are right, how many only the baseline ("lost") and only the model ("won") has right, and how probable such numbers are
    by chance (p, McNemar's test). Answers are kept one by one, so that an interruption costs none.

    \b
    Examples:
      ggufmill evaluate quants/ --against model-bf16.gguf --tasks gsm8k.json --task-questions 200
      ggufmill evaluate quants/ --against model-bf16.gguf -f wiki.test.raw --chunks 40 -o judged
      ggufmill evaluate new.gguf --against model-bf16.gguf -f wiki.test.raw --chunks 40 -o today --join judged/results.json
      ggufmill evaluate quants/ --against model-bf16.gguf -f code=code.txt -f prose=wiki.test.raw
      ggufmill evaluate "quants/*iq*.gguf" --against model-bf16.gguf -f wiki.test.raw --stock Q4_K_M,Q3_K_M --imatrix i.gguf
    """
    from ...pipeline.measuring.evaluate import evaluate_models

    call(evaluate_models, show=_text, **options)


def _text(result: Evaluation) -> str:
    from ...pipeline.judging import answered
    from ...pipeline.reports.evaluation import cells, headings, judgement_lines

    baseline = result.baseline
    lines = [
        f"baseline {baseline['path']}" + (f", perplexity {baseline['perplexity']:.4f}" if "perplexity" in baseline else "")
    ]
    lines += ["", table(headings(result.rows), [cells(row) for row in result.rows]), ""] if result.rows else [""]
    lines += [*judgement_lines(result.noise_floor, result.paired), "", result.verdict, ""] if result.rows else []
    if result.answered:
        rows = [answered.cells(row) for row in result.answered]
        lines += [table(answered.HEADINGS, rows), "", *answered.sentences(result.answered), ""]
    lines += [f"failed: {model}: {reason}" for model, reason in result.failed.items()]
    return "\n".join([*lines, *(f"wrote {path}" for path in result.files.values())])
