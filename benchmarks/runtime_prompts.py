"""Model files of any kind: ours and llama-bench of ik_llama.cpp; and matrix products by themselves.

\b
    python benchmarks/runtime_prompts.py models --rival path/to/llama-bench -t 1 out/models/*.gguf
    python benchmarks/runtime_prompts.py products --type q4_K --type iq4_k_r4

`models` lets both process and generate the same number of tokens with the same file and threads, in turns, so that a busy
machine slows down both. Medians are shown.
`products` multiplies one matrix on one thread, in G multiply-adds per second: 'tiles' with bf16 tiles (AMX), 'bytes' with
8-bit activations, as on processors without them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from models import TARGETS

from ggufmill.formats import TYPES
from ggufmill.quantize import encode
from ggufmill.runtime.backends.cpu.kernels.gemm import gemm
from ggufmill.simd.instructions import amx
from runtime import OURS, RIVAL, measure


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--rival",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="llama-bench of ik_llama.cpp; without it only ours is measured.",
)
@click.option("-t", "--threads", default=1, show_default=True)
@click.option("-p", "--prompt", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("-n", "--generation", default=32, show_default=True, help="Tokens that are generated.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the table.")
def models(
    files: tuple[Path, ...], rival: Path | None, threads: int, prompt: int, generation: int, rounds: int, as_json: bool
) -> None:
    """Tokens per second of complete models: of prompts (pp) and of generation (tg)."""
    rows = []
    for path in files:
        samples = measure(path, rival, threads, prompt, generation, rounds)
        row: dict[str, Any] = {"model": path.stem, "threads": threads, "samples": samples}
        for key in ("pp", "tg"):
            row |= {f"{key} {name}": median(speeds[key]) for name, speeds in samples.items()}
            if RIVAL in samples:
                row[f"{key} ratio"] = row[f"{key} {OURS}"] / row[f"{key} {RIVAL}"]
        rows.append(row)
        if not as_json:
            numbers = "".join(f"  {key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
            click.echo(f"{row['model']:24s} {threads} threads{numbers}")
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
            if gemm.plan_gemm(q, tensor_type, columns) is None:
                continue
            seconds, out = [], np.empty((tokens, rows), np.float32)
            for _ in range(rounds + 1):
                start = time.perf_counter()
                plan, product = gemm.plan_gemm(q, tensor_type, columns), gemm.ProductList(1)
                assert plan is not None
                product.product(1, plan, product.blocks_of(0, plan.form, gemm.Activations(x)), out, gemm.one_job(tokens))
                product.run(0)
                seconds.append(time.perf_counter() - start)
            speeds.append(f"  {form} {tokens * rows * columns / min(seconds) / 1e9:6.0f}")
        click.echo(f"{tensor_type.name:12s}{''.join(speeds)}")


if __name__ == "__main__":
    main()
