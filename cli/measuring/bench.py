"""`ggufmill bench` measures speeds as llama-bench does."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ...pipeline.common.figures import error_text, size_text
from ...pipeline.requests.measure import BenchRequest
from ..command import Verb
from ..display.console import emit, progress_bars
from ..options.fields import options_of
from ..options.results import Results, chosen, results_options
from ..options.types import MODEL

if TYPE_CHECKING:
    from ...pipeline.common.progress import Progress
    from ...pipeline.measuring.bench import BenchRow


# keyword -> column of the table, shown where several values are measured
_COLUMNS = {
    "batch": "n_batch",
    "ubatch": "n_ubatch",
    "cache_k": "type_k",
    "cache_v": "type_v",
    "k_cache_hadamard": "khad",
    "v_cache_hadamard": "vhad",
    "flash": "fa",
    "mla": "mla",
    "attn_max_batch": "amb",
    "repack": "rtr",
}
_WIDTHS = {"model": 30, "size": 11, "params": 10, "backend": 7, "threads": 7, "test": 13, "t/s": 18}
_ALWAYS = ("model", "size", "params", "backend", "threads")


@click.command(cls=Verb)
@options_of(BenchRequest, json=False, models={"nargs": -1, "type": MODEL})
@results_options("md", "json", "csv", "jsonl")
def command(results: Results, as_json: bool, **options: Any) -> None:
    """Measure tokens per second of MODELS (GGUFs or Hugging Face folders), in the columns of llama-bench.

    Every combination of the values given is measured; most options take several with commas between them.

    \b
    Examples:
      ggufmill bench model.gguf -p 512 -n 64 -t 1,2
      ggufmill bench model.gguf -pg 512,128 -ctk f16,q8_0 -o speeds.csv
      ggufmill bench model.gguf --device cuda -ot exps=CPU
    """
    from ...pipeline.measuring.bench import benchmark

    options = {name: value for name, value in options.items() if value != ()}  # the library's defaults
    results = chosen(results, as_json)
    columns = [column for name, column in _COLUMNS.items() if name in options]
    with results.printed():
        if results.form == "json":
            with progress_bars() as progress:
                result = benchmark(progress=progress, **options)
            emit(result.as_json, True, str)
        else:
            benchmark(progress=_Writer(results.form, [*_ALWAYS, *columns, "test", "t/s"]), **options)


class _Writer:
    """Prints rows as they come: a Markdown table with the chosen columns, CSV or JSON lines with all."""

    def __init__(self, form: str, columns: list[str]):
        self.form, self.columns, self.has_head = form, columns, False

    def __call__(self, progress: Progress) -> None:
        if progress.partial is not None:
            {"md": self._markdown, "jsonl": self._json_line, "csv": self._csv}[self.form](progress.partial.rows[-1])
            self.has_head = True

    def _markdown(self, row: BenchRow) -> None:
        from ...pipeline.measuring.bench import parameters_text

        if not self.has_head:
            click.echo("| " + " | ".join(self._cell(name, name) for name in self.columns) + " |")
            click.echo("| " + " | ".join(self._rule(name) for name in self.columns) + " |")
        cells = asdict(row) | {
            "size": size_text(row.model_size),
            "params": parameters_text(row.model_n_params),
            "threads": row.n_threads,
            "t/s": error_text(row.tokens_per_second, row.stddev, 2),
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
