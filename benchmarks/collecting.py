"""What collecting an importance matrix costs: processor time of the perplexity run against the same with collection.

\b
    python benchmarks/collecting.py MODEL.gguf [MODEL.gguf ...] --threads 2 --rounds 7

Both read the same windows of 512 tokens (random ids), alternately and in one process, each first in every second round; the
figure is the median of the rounds' ratios, with their range. Windows run four at a time in both, one of them alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np

from ggufmill.imatrix.collect import collect
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import perplexity

_N_CTX = 512


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """(processor seconds, seconds) of the work."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def rounds_of(path: Path, threads: int, rounds: int, chunks: int) -> list[dict[str, tuple[float, float]]]:
    model = load_model(path, threads=threads)
    low = min(300, model.n_vocab // 2)  # past the special tokens
    tokens = np.random.default_rng(1).integers(low, model.n_vocab, chunks * _N_CTX)
    work = {
        "perplexity": lambda: perplexity(model, tokens, n_ctx=_N_CTX, chunks=chunks),
        "collect": lambda: collect(model, tokens, n_ctx=_N_CTX, chunks=chunks),
    }
    for run in work.values():  # kernels compile
        run()
    times = []
    for number in range(rounds):
        order = list(work) if number % 2 == 0 else list(work)[::-1]
        times.append({name: seconds(work[name]) for name in order})
    return times


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--chunks", default=13, show_default=True, help="Windows; one more than a multiple of four.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(models: tuple[Path, ...], threads: int, rounds: int, chunks: int, json_file: Path | None) -> None:
    results = {path.stem: rounds_of(path, threads, rounds, chunks) for path in models}
    click.echo("| model | threads | perplexity | with collection | costs | range |\n|---|--:|--:|--:|--:|--:|")
    for name, times in results.items():
        ratios = [r["collect"][0] / r["perplexity"][0] - 1 for r in times]
        alone, both = (median(r[work][1] for r in times) for work in ("perplexity", "collect"))
        costs = f"{median(ratios):.1%} | {min(ratios):.1%} to {max(ratios):.1%}"
        click.echo(f"| {name} | {threads} | {alone:.2f} s | {both:.2f} s | {costs} |")
    if json_file:
        json_file.write_text(json.dumps({"threads": threads, "chunks": chunks, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
