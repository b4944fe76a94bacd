"""`ggufmill bench` measures speeds as llama-bench does."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.common.messages import gib
from .command import Verb
from .display.console import emit, progress_bars
from .options import devices, flags
from .options.settings import CACHE_TYPES
from .options.types import MODEL, Listed

if TYPE_CHECKING:
    from ..pipeline.bench import BenchRow
    from ..pipeline.common.progress import Progress


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


_NUMBER, _CACHE = Listed(int, "a number"), Listed(_cache_type, "a cache type")
_SWITCH = Listed(lambda text: {"0": False, "1": True}[text], "0 or 1")

# Options of which every combination is measured: (short, long, keyword, column of the table, type, help).
_GRID = (
    ("-t", "--threads", "threads", "threads", _NUMBER, "Numbers of threads. [default: all processors]"),
    ("-b", "--batch-size", "batch", "n_batch", _NUMBER, "Logical batch size in tokens. [default: 2048]"),
    ("-ub", "--ubatch-size", "ubatch", "n_ubatch", _NUMBER, "Tokens per pass. [default: 2048]"),
    ("-ctk", "--cache-type-k", "cache_k", "type_k", _CACHE, "Types of the cached keys. [default: f16]"),
    ("-ctv", "--cache-type-v", "cache_v", "type_v", _CACHE, "Types of the cached values. [default: f16]"),
    ("-fa", "--flash-attn", "flash", "fa", _SWITCH, "0, 1 or both. [default: 1]"),
    ("-mla", "--mla-use", "mla", "mla", _NUMBER, "Ways of latent attention, 0 to 3. [default: 3]"),
    ("-amb", "--attn-max-batch", "attn_max_batch", "amb", _NUMBER, "MiB for the buffers of attention. [default: 512]"),
    ("-rtr", "--run-time-repack", "repack", "rtr", _SWITCH, "0, 1 or both. [default: 0]"),
)
_WIDTHS = {"model": 30, "size": 11, "params": 10, "backend": 7, "threads": 7, "test": 13, "t/s": 18}
_ALWAYS = ("model", "size", "params", "backend", "threads")


def _joined(ctx: click.Context, param: click.Parameter, given: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    """The values of an option that was given several times, each time with several."""
    return tuple(itertools.chain(*given))


def _several(*names: str, type: click.ParamType, help: str) -> Callable[[Callable], Callable]:
    return click.option(*names, type=type, multiple=True, callback=_joined, help=help)


_grid = flags.together(*(_several(*names, type=type, help=help) for *names, column, type, help in _GRID))


@click.command(cls=Verb)
@click.argument("models", nargs=-1, required=True, type=MODEL)
@_several("-p", "--n-prompt", type=_NUMBER, help="Prompt lengths; 0: none. [default: 512]")
@_several("-n", "--n-gen", type=_NUMBER, help="Tokens to generate; 0: none. [default: 128]")
@click.option("-pg", "prompt_and_gen", type=_Pair(), multiple=True, help="A prompt and then generation, timed together.")
@click.option("-gp", "gen_after_prompt", type=_Pair(), multiple=True, help="Generation after a prompt that is not timed.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Of each test.")
@_grid
@devices.placement
@flags.reading
@click.option(
    "-w",
    "--warmup",
    type=click.Choice(["0", "1"]),
    default="1",
    show_default=True,
    callback=lambda ctx, param, value: value == "1",
    help="Run before measuring.",
)
@click.option(
    "-o", "--output", "form", type=click.Choice(["md", "json", "csv", "jsonl"]), default="md", show_default=True, help="Format."
)
@click.option("--json", "as_json", is_flag=True, help="The same as -o json: one JSON object on stdout.")
def command(models: Any, form: str, as_json: bool, placement: dict[str, Any], **options: Any) -> None:
    """Tokens per second of MODELS (GGUFs or Hugging Face folders), in the columns of llama-bench.

    Every combination of the values given is measured; most options take several with commas between them.

    \b
    Examples:
      ggufmill bench model.gguf -p 512 -n 64 -t 1,2
      ggufmill bench model.gguf -pg 512,128 -ctk f16,q8_0 -o csv
      ggufmill bench model.gguf --device cuda -ot exps=CPU
    """
    from ..pipeline.bench import GENERATION, PROMPT, benchmark

    options["n_prompt"], options["n_gen"] = options["n_prompt"] or PROMPT, options["n_gen"] or GENERATION
    columns = [column for *_, keyword, column, _, _ in _GRID if options[keyword] and keyword != "threads"]
    writer = _Writer(form, [*_ALWAYS, *columns, "test", "t/s"])
    if as_json or form == "json":
        with progress_bars() as progress:
            result = benchmark(models, progress=progress, **options, **placement)
        emit(result.as_json, True, str)
    else:
        benchmark(models, progress=writer, **options, **placement)


class _Writer:
    """Prints rows as they come: a Markdown table with the chosen columns, CSV or JSON lines with all."""

    def __init__(self, form: str, columns: list[str]):
        self.form, self.columns, self.has_head = form, columns, False

    def __call__(self, progress: Progress) -> None:
        if progress.partial is not None:
            {"md": self._markdown, "jsonl": self._json_line, "csv": self._csv}[self.form](progress.partial.rows[-1])
            self.has_head = True

    def _markdown(self, row: BenchRow) -> None:
        from ..pipeline.bench import parameters_text

        if not self.has_head:
            click.echo("| " + " | ".join(self._cell(name, name) for name in self.columns) + " |")
            click.echo("| " + " | ".join(self._rule(name) for name in self.columns) + " |")
        cells = asdict(row) | {
            "size": gib(row.model_size),
            "params": parameters_text(row.model_n_params),
            "threads": row.n_threads,
            "t/s": f"{row.tokens_per_second:.2f} ± {row.stddev:.2f}",
        }
        click.echo("| " + " | ".join(self._cell(name, str(cells[name])) for name in self.columns) + " |")

    def _json_line(self, row: BenchRow) -> None:
        click.echo(json.dumps(asdict(row)))

    def _csv(self, row: BenchRow) -> None:
        text, values = io.StringIO(), asdict(row) | {"samples": " ".join(f"{v:.3f}" for v in row.samples)}
        writer = csv.DictWriter(text, list(values), lineterminator="\n")
        if not self.has_head:
            writer.writeheader()
        writer.writerow(values)
        click.echo(text.getvalue(), nl=False)

    def _width(self, name: str) -> int:
        return max(_WIDTHS.get(name, 0), len(name), 6)

    def _cell(self, name: str, text: str) -> str:
        return text.ljust(self._width(name)) if name in ("model", "backend") else text.rjust(self._width(name))

    def _rule(self, name: str) -> str:
        dashes = "-" * (self._width(name) - 1)
        return dashes + "-" if name in ("model", "backend") else dashes + ":"
