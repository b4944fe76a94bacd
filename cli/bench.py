"""`ggufmill bench` measures speeds as llama-bench does."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.console import emit, gib, progress_bar
from .options import flags
from .options.settings import CACHE_TYPES

if TYPE_CHECKING:
    from ..formats import TensorSource

MiB = 1 << 20


class _Pair(click.ParamType):
    name = "pp,tg"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            prompt, generation = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not two numbers like 512,128", param, ctx)
        return prompt, generation


def _cache_type(text: str) -> str:
    return {name.lower(): name for name in CACHE_TYPES}[text.lower()]


_NUMBER, _CACHE = flags.Listed(int, "a number"), flags.Listed(_cache_type, "a cache type")
_SWITCH = flags.Listed(lambda text: {"0": False, "1": True}[text], "0 or 1")

# Options whose every combination is measured -> (field of Settings, column, how the value gets there).
_GRID: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "threads": ("threads", "threads", int),
    "batch_size": ("batch", "n_batch", int),
    "ubatch_size": ("ubatch", "n_ubatch", int),
    "cache_type_k": ("cache_k", "type_k", str),
    "cache_type_v": ("cache_v", "type_v", str),
    "flash_attn": ("flash", "fa", bool),
    "mla_use": ("mla", "mla", int),
    "attn_max_batch": ("attention_bytes", "amb", lambda mebibytes: mebibytes * MiB),
    "run_time_repack": ("repack", "rtr", bool),
}
_WIDTHS = {"model": 30, "size": 11, "params": 10, "backend": 7, "threads": 7, "test": 13, "t/s": 18}
_ALWAYS = ("model", "size", "params", "backend", "threads")


def _grid_option(*names: str, type: click.ParamType, text: str) -> Callable[[Callable], Callable]:
    return click.option(*names, type=type, multiple=True, help=text)


@click.command(short_help="Speed of prompts and of generation")
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-p", "--n-prompt", type=_NUMBER, multiple=True, help="Prompt lengths; 0: none. [default: 512]")
@click.option("-n", "--n-gen", type=_NUMBER, multiple=True, help="Tokens to generate; 0: none. [default: 128]")
@click.option("-pg", "prompt_and_gen", type=_Pair(), multiple=True, help="A prompt and then generation, timed together.")
@click.option("-gp", "gen_after_prompt", type=_Pair(), multiple=True, help="Generation after a prompt that is not timed.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Of each test.")
@_grid_option("-t", "--threads", type=_NUMBER, text="Numbers of threads. [default: all processors]")
@_grid_option("-b", "--batch-size", type=_NUMBER, text="Tokens taken on together. [default: 2048]")
@_grid_option("-ub", "--ubatch-size", type=_NUMBER, text="Tokens per pass. [default: 2048]")
@_grid_option("-ctk", "--cache-type-k", type=_CACHE, text="Types of the cached keys. [default: f16]")
@_grid_option("-ctv", "--cache-type-v", type=_CACHE, text="Types of the cached values. [default: f16]")
@_grid_option("-fa", "--flash-attn", type=_SWITCH, text="0, 1 or both. [default: 1]")
@_grid_option("-mla", "--mla-use", type=_NUMBER, text="Ways of latent attention, 0 to 3. [default: 3]")
@_grid_option("-amb", "--attn-max-batch", type=_NUMBER, text="MiB for the buffers of attention. [default: 512]")
@_grid_option("-rtr", "--run-time-repack", type=_SWITCH, text="0, 1 or both. [default: 0]")
@click.option("-w", "--warmup", type=click.Choice(["0", "1"]), default="1", show_default=True, help="Run before measuring.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["md", "json", "csv", "jsonl"]), default="md", show_default=True, help="Format."
)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json: one JSON object on stdout.")
def command(
    models: tuple[Path, ...],
    n_prompt: tuple[tuple[int, ...], ...],
    n_gen: tuple[tuple[int, ...], ...],
    prompt_and_gen: tuple[tuple[int, int], ...],
    gen_after_prompt: tuple[tuple[int, int], ...],
    repetitions: int,
    warmup: str,
    form: str,
    as_json: bool,
    **grid: tuple[tuple[Any, ...], ...],
) -> None:
    """Tokens per second of MODELS (GGUFs or Hugging Face folders), in the columns of llama-bench.

    Every combination of the values given is measured; most options take several with commas between them.

    \b
    Examples:
      ggufmill bench model.gguf -p 512 -n 64 -t 1,2
      ggufmill bench model.gguf -pg 512,128 -ctk f16,q8_0 -o csv
    """
    from ..convert import open_source
    from ..runtime.evaluate.bench import Case, bench
    from ..runtime.evaluate.provenance import describe_model, describe_program
    from .options.settings import load

    form = "json" if as_json else form
    prompts = list(itertools.chain(*n_prompt)) if n_prompt else [512]
    lengths = list(itertools.chain(*n_gen)) if n_gen else [128]
    tests = [Case(n, 0) for n in prompts if n] + [Case(0, n) for n in lengths if n]
    tests += [Case(*pair) for pair in prompt_and_gen] + [Case(*pair, only_gen=True) for pair in gen_after_prompt]
    if not tests:
        raise click.UsageError("nothing to measure: -p and -n are 0, and neither -pg nor -gp is given")
    chosen = {key: list(itertools.chain(*values)) for key, values in grid.items() if values}
    shown = [*_ALWAYS, *(_GRID[key][1] for key in chosen if key != "threads"), "test", "t/s"]
    writer, rows, about = _Writer(form, shown), [], []
    sources = [open_source(path) for path in models]
    grid_points = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
    _check(sources, grid_points)
    total = len(sources) * len(grid_points) * len(tests)
    bar = progress_bar(total=total, desc="bench", unit="test", disable=form != "json")
    for source in sources:
        for point in grid_points:
            loaded = load(source, _settings(point))
            if not about or about[-1]["path"] != loaded.source.path:
                about.append(describe_model(loaded))

            def report(speed: Any, loaded: Any = loaded) -> None:
                row = _row(loaded, about[-1], speed)
                rows.append(row)
                writer.row(row)
                bar.update()

            bench(loaded, tests, repetitions, warmup == "1", report)
    bar.close()
    if form == "json":
        emit({"rows": rows, "models": about, "program": describe_program()}, True, str)


def _settings(point: dict[str, Any]) -> dict[str, Any]:
    """Those of `load_model`, of a value for each option of the grid."""
    return {_GRID[key][0]: _GRID[key][2](value) for key, value in point.items()}


def _check(sources: list[TensorSource], grid_points: list[dict[str, Any]]) -> None:
    """Raises MillError for what cannot work, named, before hours of measuring are lost to it. No weights are read."""
    from ..formats import MillError
    from ..runtime import load_model

    options = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    for source, point in itertools.product(sources, grid_points):
        try:
            load_model(source, **_settings(point) | {"repack": False})
        except MillError as error:
            if len(sources) * len(grid_points) == 1:
                raise
            values = " ".join(f"{options[key]} {int(v) if isinstance(v, bool) else v}" for key, v in point.items())
            which = f"{source.path} with {values}" if values else source.path
            raise type(error)(f"{error} (that is {which}; nothing was measured)") from None


def _row(model: Any, about: dict[str, Any], speed: Any) -> dict[str, Any]:
    from ..runtime.evaluate.provenance import describe_settings

    used, case = describe_settings(model), speed.case
    largest = next(iter(about["types"]), "")
    return {
        "model": f"{about['architecture']} {_count(about['parameters'])} {largest}",
        "model_path": about["path"],
        "model_digest": about["files"][0]["digest"] if about["files"] else None,
        "model_size": about["nbytes"],
        "model_n_params": about["parameters"],
        "backend": "CPU",
        "n_threads": used["threads"],
        "n_batch": used["batch"],
        "n_ubatch": used["ubatch"],
        "type_k": used["cache_k"],
        "type_v": used["cache_v"],
        "fa": int(used["flash"]),
        "mla": used.get("mla"),
        "amb": used["attention_bytes"] // MiB,
        "rtr": int(used["repack"]),
        "test": case.name,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "tokens_per_second": speed.mean,
        "stddev": speed.stddev,
        "samples": speed.samples,
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


class _Writer:
    """Rows as they come: a Markdown table with the chosen columns, CSV or JSON lines with all."""

    def __init__(self, form: str, columns: list[str]):
        self.form, self.columns, self.begun = form, columns, False

    def row(self, row: dict[str, Any]) -> None:
        if self.form == "md":
            if not self.begun:
                click.echo("| " + " | ".join(self._cell(name, name) for name in self.columns) + " |")
                click.echo("| " + " | ".join(self._rule(name) for name in self.columns) + " |")
            shown = row | {
                "size": gib(row["model_size"]),
                "params": _count(row["model_n_params"]),
                "threads": row["n_threads"],
                "t/s": f"{row['tokens_per_second']:.2f} ± {row['stddev']:.2f}",
            }
            click.echo("| " + " | ".join(self._cell(name, str(shown[name])) for name in self.columns) + " |")
        elif self.form == "jsonl":
            click.echo(json.dumps(row))
        elif self.form == "csv":
            text = io.StringIO()
            values = row | {"samples": " ".join(f"{v:.3f}" for v in row["samples"])}
            writer = csv.DictWriter(text, list(values), lineterminator="\n")
            if not self.begun:
                writer.writeheader()
            writer.writerow(values)
            click.echo(text.getvalue(), nl=False)
        self.begun = True

    def _width(self, name: str) -> int:
        return max(_WIDTHS.get(name, 0), len(name), 6)

    def _cell(self, name: str, text: str) -> str:
        return text.ljust(self._width(name)) if name in ("model", "backend") else text.rjust(self._width(name))

    def _rule(self, name: str) -> str:
        dashes = "-" * (self._width(name) - 1)
        return dashes + "-" if name in ("model", "backend") else dashes + ":"
