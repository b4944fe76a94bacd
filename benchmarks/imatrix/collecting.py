"""What collecting an importance matrix costs, and covariances beside it: processor time of the perplexity run against the same
with collection.

\b
    python benchmarks/imatrix/collecting.py MODEL.gguf [MODEL.gguf ...] --threads 2 --rounds 7

All read the same windows of 512 tokens (random ids), alternately and in one process, in reverse order in every second round;
the figure is the median of the rounds' ratios, with their range. Windows run four at a time, one of them alone. The file of
covariances is not written.
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
from ggufmill.imatrix.covariance.collector import CovarianceCollector
from ggufmill.imatrix.covariance.inputs import covariance_inputs
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

    def collect_covariance() -> None:
        sums = CovarianceCollector(covariance_inputs(model.graph), model.workers)
        collect(model, tokens, n_ctx=_N_CTX, chunks=len(tokens) // _N_CTX, covariance=sums)

    work = {
        "perplexity": lambda: perplexity(model, tokens, n_ctx=_N_CTX, chunks=len(tokens) // _N_CTX),
        "collect": lambda: collect(model, tokens, n_ctx=_N_CTX, chunks=len(tokens) // _N_CTX),
        "covariance": collect_covariance,
    }
    all_tokens, tokens = tokens, tokens[: 2 * _N_CTX]
    for run in work.values():  # kernels compile
        run()
    tokens, results = all_tokens, []
    for number in range(rounds):
        order = list(work) if number % 2 == 0 else list(work)[::-1]
        results.append({name: seconds(work[name]) for name in order})
    return results


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--chunks", default=13, show_default=True, help="Windows; one more than a multiple of four.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(models: tuple[Path, ...], threads: int, rounds: int, chunks: int, json_file: Path | None) -> None:
    results = {path.stem: rounds_of(path, threads, rounds, chunks) for path in models}
    click.echo("| model | threads | perplexity | collected | with | costs | range |\n|---|--:|--:|---|--:|--:|--:|")
    for name, measured in results.items():
        for what in ("collect", "covariance"):
            ratios = [r[what][0] / r["perplexity"][0] - 1 for r in measured]
            alone, both = (median(r[kind][1] for r in measured) for kind in ("perplexity", what))
            costs = f"{median(ratios):.1%} | {min(ratios):.1%} to {max(ratios):.1%}"
            click.echo(f"| {name} | {threads} | {alone:.2f} s | {what} | {both:.2f} s | {costs} |")
    if json_file:
        json_file.write_text(json.dumps({"threads": threads, "chunks": chunks, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
