"""Prompt processing: ours and llama-bench of ik_llama.cpp, and matrix products by themselves.

\b
    python benchmarks/runtime_prompts.py models --rival path/to/llama-bench -t 1 out/models/*.gguf
    python benchmarks/runtime_prompts.py products --type q4_K --type iq4_k_r4

`models` lets both process the same number of tokens of the same file with the same threads, alternately, so that a busy machine
slows down both; the head sees the last token only, as in llama-bench. Of each the best run counts, and the median is shown.
`products` multiplies one matrix on one thread, in G multiply-adds per second: 'tiles' with bf16 tiles (AMX), 'bytes' with
8-bit activations, as on processors without them.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np
from models import TARGETS

from ggufmill.formats import TYPES
from ggufmill.quantize import encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm
from ggufmill.simd.instructions import amx


def _ours(path: Path, threads: int, tokens: int) -> Callable[[], float]:
    """A function that processes a prompt and returns tokens per second."""
    model = load_model(path, threads=threads)
    ids = np.random.default_rng(0).integers(3, model.n_vocab, tokens)

    def run() -> float:
        cache = model.new_cache(tokens)
        start = time.perf_counter()
        model.head(model.hidden([(cache, ids)])[0][-1:])
        return tokens / (time.perf_counter() - start)

    run()  # compiles what is not compiled yet, and fills the system's file cache
    return run


def _rival(program: str, path: Path, threads: int, tokens: int) -> list[float]:
    command = [program, "-m", str(path), "-p", str(tokens), "-n", "0", "-t", str(threads), "-r", "2", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)[0]["samples_ts"]


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rival", help="llama-bench of ik_llama.cpp; without it only ours is measured.")
@click.option("-t", "--threads", default=1, show_default=True)
@click.option("-p", "--tokens", default=512, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the table.")
def models(files: tuple[Path, ...], rival: str | None, threads: int, tokens: int, rounds: int, as_json: bool) -> None:
    """Tokens per second of complete models."""
    rows = []
    for path in files:
        run, ours, theirs = _ours(path, threads, tokens), [], []
        for _ in range(rounds):
            ours += [run(), run()]
            theirs += _rival(rival, path, threads, tokens) if rival else []
        row = {"model": path.stem, "threads": threads, "tokens": tokens, "ours": max(ours), "ours_median": median(ours)}
        if theirs:
            row |= {"rival": max(theirs), "rival_median": median(theirs), "ratio": max(ours) / max(theirs)}
            row["ratio_of_medians"] = median(ours) / median(theirs)
        rows.append(row)
        if not as_json:
            numbers = "".join(f"  {key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
            click.echo(f"{row['model']:20s} {threads} threads{numbers}")
    if as_json:
        click.echo(json.dumps({"rows": rows}, indent=1))


@main.command()
@click.option("--type", "types", multiple=True, help="Default: those that targets exist for, and their repacked types.")
@click.option("--tokens", default=512, show_default=True)
@click.option("--rows", default=1024, show_default=True)
@click.option("--columns", default=1024, show_default=True)
@click.option("--rounds", default=10, show_default=True)
def products(types: tuple[str, ...], tokens: int, rows: int, columns: int, rounds: int) -> None:
    """G multiply-adds per second of one matrix, unpacking included, on one thread."""
    random = np.random.default_rng(0)
    x, w = (random.standard_normal((n, columns)).astype(np.float32) for n in (tokens, rows))
    repacked = [packed for name in TARGETS if (packed := TYPES[name].packed)]
    permitted = amx.permitted()
    for name in types or (*TARGETS, *repacked):
        tensor_type = TYPES[name]
        q = encode(w, name, np.ones(columns, np.float32))
        speeds = []
        for form in ("tiles", "bytes"):
            if form == "tiles" and not permitted:
                continue
            amx.permitted = lambda form=form: form == "tiles"  # type: ignore[assignment]
            if gemm.plan(q, tensor_type, columns) is None:
                continue
            seconds, out = [], np.empty((tokens, rows), np.float32)
            for _ in range(rounds + 1):
                start = time.perf_counter()
                gemm.multiply(q, tensor_type, gemm.Activations(x), out)
                seconds.append(time.perf_counter() - start)
            speeds.append(f"  {form} {tokens * rows * columns / min(seconds) / 1e9:6.0f}")
        click.echo(f"{tensor_type.name:12s}{''.join(speeds)}")


if __name__ == "__main__":
    main()
