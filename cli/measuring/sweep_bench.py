"""`ggufmill sweep-bench` measures speeds over the depth of the context."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.requests.measure import SweepRequest
from ..command import Verb
from ..display.console import emit, progress_bars
from ..display.origins import settings_text
from ..options.fields import options_of
from ..options.results import Results, chosen, results_options

if TYPE_CHECKING:
    from ...pipeline.common.progress import Progress
    from ...pipeline.measuring.sweep_bench import SweepResult

_HEADINGS = (("PP", 6), ("TG", 6), ("N_KV", 6), ("T_PP s", 8), ("S_PP t/s", 8), ("T_TG s", 8), ("S_TG t/s", 8))


@click.command(cls=Verb)
@options_of(SweepRequest, json=False)
@results_options("md", "jsonl", "json")
def command(results: Results, as_json: bool, **options: Any) -> None:
    """Measure how fast MODEL (a GGUF or a Hugging Face folder) reads and generates as its context fills up.

    At each depth tokens are generated and taken back, then a prompt is read that stays, as llama-sweep-bench does.

    \b
    Examples:
      ggufmill sweep-bench model.gguf -c 8192 -ub 512
      ggufmill sweep-bench model.gguf -c 4096 -ctk q8_0 -ctv q8_0 --plot speed.png
    """
    from ...pipeline.measuring.sweep_bench import sweep_benchmark

    results = chosen(results, as_json)
    with results.printed():
        if results.form == "json":
            with progress_bars() as progress:
                result = sweep_benchmark(progress=progress, **options)
            emit(result.as_json, True, str)
        else:
            sweep_benchmark(progress=_print_json_line if results.form == "jsonl" else _print_row, **options)


def _print_json_line(progress: Progress) -> None:
    from ...pipeline.measuring.sweep_bench import row_json

    result: SweepResult | None = progress.partial
    if result is not None:
        about = {"n_kv_max": result.n_kv_max, "n_threads": result.settings["threads"]}
        click.echo(json.dumps(row_json(result.rows[-1]) | about))


def _print_row(progress: Progress) -> None:
    """The row of a Markdown table that was measured last, the first one with the head."""
    result: SweepResult | None = progress.partial
    if result is None:
        return
    if len(result.rows) == 1:
        click.echo(f"n_kv_max = {result.n_kv_max}, {settings_text(result.settings)}\n")
        click.echo(_line([f"{name:>{width}}" for name, width in _HEADINGS]))
        click.echo(_line(["-" * (width - 1) + ":" for _, width in _HEADINGS]))
    depth = result.rows[-1]
    values = (depth.t_pp, depth.s_pp, depth.t_tg, depth.s_tg)
    numbers = [f"{n:6d}" for n in (depth.pp, depth.tg, depth.n_kv)]
    click.echo(_line([*numbers, *(f"{v:8.{3 - i % 2}f}" for i, v in enumerate(values))]))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
