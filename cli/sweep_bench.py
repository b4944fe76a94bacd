"""`ggufmill sweep-bench` measures speeds over the depth of the context."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..pipeline.console import emit, progress_bar
from ..pipeline.reports.plots import plot_sweep
from ..pipeline.reports.result_comparison import setting_text
from .options import flags
from .options.settings import load, run_options

HEADINGS = (("PP", 6), ("TG", 6), ("N_KV", 6), ("T_PP s", 8), ("S_PP t/s", 8), ("T_TG s", 8), ("S_TG t/s", 8))


@click.command(short_help="Speed over the depth of the context")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@run_options(n_ctx=4096)
@click.option("--pp", type=click.IntRange(1), help="Prompt tokens per step. [default: -ub, or 512]")
@click.option("-n", "--tg", type=click.IntRange(1), help="Tokens generated per step. [default: a quarter of the prompt's]")
@click.option("--no-warmup", is_flag=True, help="Measure at once: the first figures then include the compiling of kernels.")
@flags.plot("the speeds")
@click.option(
    "-o",
    "--output-format",
    type=click.Choice(["md", "jsonl", "json"]),
    default="md",
    show_default=True,
    help="jsonl: a line per depth.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json: one JSON object on stdout.")
def command(
    model: Path,
    pp: int | None,
    tg: int | None,
    no_warmup: bool,
    plot: Path | None,
    output_format: str,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """How fast MODEL (a GGUF or a Hugging Face folder) reads and generates as its context fills up.

    At each depth tokens are generated and taken back, then a prompt is read that stays, as llama-sweep-bench does.

    \b
    Examples:
      ggufmill sweep-bench model.gguf -c 8192 -ub 512
      ggufmill sweep-bench model.gguf -c 4096 -ctk q8_0 -ctv q8_0 --plot speed.png
    """
    from ..convert import open_source
    from ..runtime.evaluate.bench import sweep
    from ..runtime.evaluate.provenance import describe_model, describe_program, describe_settings

    loaded = load(open_source(model), settings)
    used, about, rows = describe_settings(loaded), describe_model(loaded), []
    form = "json" if as_json else output_format
    step = pp or settings.get("ubatch", 512)
    depths = sweep(loaded, settings["n_ctx"], step, tg, not no_warmup)
    total = len(range(0, settings["n_ctx"] - max(step, tg or 0) + 1, step))
    for depth in progress_bar(iterable=depths, total=total, desc="sweep-bench", unit="depth", disable=form != "json"):
        if form == "md" and not rows:
            click.echo(f"n_kv_max = {settings['n_ctx']}, {setting_text(used)}\n")
            click.echo(_line([f"{name:>{width}}" for name, width in HEADINGS]))
            click.echo(_line(["-" * (width - 1) + ":" for _, width in HEADINGS]))
        rows.append(depth)
        if form == "md":
            values = (depth.t_pp, depth.s_pp, depth.t_tg, depth.s_tg)
            numbers = [f"{n:6d}" for n in (depth.pp, depth.tg, depth.n_kv)]
            click.echo(_line([*numbers, *(f"{v:8.{3 - i % 2}f}" for i, v in enumerate(values))]))
        elif form == "jsonl":
            click.echo(json.dumps(_row(depth) | {"n_kv_max": settings["n_ctx"], "n_threads": used["threads"]}))
    if form == "json":
        result = {"rows": [_row(r) for r in rows], "n_kv_max": settings["n_ctx"], "about": about, "settings": used}
        emit(result | {"program": describe_program()}, True, str)
    if plot is not None:
        types = ", ".join(list(about["types"])[:2])
        plot_sweep(rows, f"{model.name} ({types}), {used['threads']} threads, cache {used['cache_k']}/{used['cache_v']}", plot)


def _row(depth: Any) -> dict[str, Any]:
    return asdict(depth) | {"speed_pp": depth.s_pp, "speed_tg": depth.s_tg}


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
