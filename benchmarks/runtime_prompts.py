"""Model files of any kind: ours and llama-bench of ik_llama.cpp; and matrix products by themselves.

\b
    python benchmarks/runtime_prompts.py models --rival path/to/llama-bench -t 1 out/models/*.gguf
    python benchmarks/runtime_prompts.py models --rival path/to/llama-bench --processor-time -p 2,8,32 -n 0 out/models/*.gguf
    python benchmarks/runtime_prompts.py models --rival path/to/llama-bench --rival-option=-mla --rival-option=3 mla.gguf
    python benchmarks/runtime_prompts.py first-token --rival path/to/llama-cli out/models/*.gguf
    python benchmarks/runtime_prompts.py windows --rival path/to/bin --text recipes/demo/calibration.txt out/models/*.gguf
    python benchmarks/runtime_prompts.py products --type q4_K --type iq4_k_r4
    python benchmarks/runtime_prompts.py rounding --text recipes/demo/heldout.txt bf16.gguf q4_K.gguf iq4_k.gguf

`models` lets both process and generate the same number of tokens with the same file and threads, in turns, so that a busy
machine slows down both; or counts processor time, of one thread (as runtime.py does). Medians are shown.
`first-token` runs both programs from their start to the first token that they generate: seconds of the processor, and
memory that is no file's.
`windows` runs perplexity and imatrix of both programs on a text, each with two numbers of windows: seconds of the processor of
the longer run, and a window's, which is the difference of the two and so has no starting and loading in it.
`products` multiplies one matrix on one thread, in G multiply-adds per second: 'tiles' with bf16 tiles (AMX), 'bytes' with
8-bit activations, as on processors without them; those with `fast` come after them.
`rounding` says what the roundings of products cost: mean KL divergences (and medians) over the tokens of a text.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from models import TARGETS
from true_size import MILL, measured

from ggufmill.formats import TYPES
from ggufmill.quantize import encode
from ggufmill.runtime import load_model
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
@click.option("--rival-option", "options", multiple=True, help="An option of llama-bench, or its value.")
@click.option("-t", "--threads", default=1, show_default=True)
@click.option("-p", "--prompt", "prompts", default="512", show_default=True, help="Tokens of a prompt; several: 2,8,32.")
@click.option("-n", "--generation", default=32, show_default=True, help="Tokens that are generated; 0: none.")
@click.option("--rounded", is_flag=True, help="With fast, as generation and serving run.")
@click.option("--processor-time", is_flag=True, help="Count processor time, of one thread, in place of the clock.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the table.")
def models(
    files: tuple[Path, ...],
    rival: Path | None,
    options: tuple[str, ...],
    threads: int,
    prompts: str,
    generation: int,
    rounded: bool,
    processor_time: bool,
    rounds: int,
    as_json: bool,
) -> None:
    """Tokens per second of complete models: of prompts (pp) and of generation (tg), and the largest distance of a round from
    the median."""
    rows = []
    for path in files:
        for prompt in map(int, prompts.split(",")):
            samples = measure(path, rival, threads, prompt, generation, rounds, rounded, processor_time, options)
            row: dict[str, Any] = {"model": path.stem, "threads": threads, "prompt": prompt, "samples": samples}
            for key in samples[OURS]:
                row |= {f"{key} {name}": median(speeds[key]) for name, speeds in samples.items()}
                if RIVAL in samples:
                    row[f"{key} ratio"] = row[f"{key} {OURS}"] / row[f"{key} {RIVAL}"]
            row["spread"] = max(abs(v / median(s) - 1) for speeds in samples.values() for s in speeds.values() for v in s)
            rows.append(row)
            if not as_json:
                numbers = "".join(f"  {key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
                click.echo(f"{row['model']:24s} {threads} threads, {prompt} tokens{numbers}")
    if as_json:
        click.echo(json.dumps({"rows": rows}, indent=1))


@main.command("first-token")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rival", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="llama-cli of ik_llama.cpp.")
@click.option("--rival-option", "options", multiple=True, help="An option of llama-cli, or its value.")
@click.option("-c", "--ctx-size", default=512, show_default=True, help="Of both programs.")
@click.option("--rounds", default=5, show_default=True, help="Runs of each, in turns; the best counts.")
def first_token(files: tuple[Path, ...], rival: Path | None, options: tuple[str, ...], ctx_size: int, rounds: int) -> None:
    """From the start of a program to the first token of a prompt of one word, on one thread."""
    for path in files:
        asked = ["-p", "One", "-n", "1", "--temp", "0", "-t", "1", "-c", str(ctx_size)]
        commands = {OURS: [*MILL, "generate", str(path), *asked]}
        if rival is not None:
            commands[RIVAL] = [str(rival), "-m", str(path), *asked, *options]
        runs = [{name: measured(command) for name, command in commands.items()} for _ in range(rounds + 1)][1:]
        for name in commands:
            failed = [run[name][3] for run in runs if run[name][3]]
            seconds, memory = min(run[name][1] for run in runs), max(run[name][2] for run in runs)
            say = f"exit code {failed[0]}" if failed else f"{seconds:.2f} s of the processor, {memory >> 20} MiB"
            click.echo(f"{path.stem:24s} {name:6s} {say}")


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rival", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the rival's programs.")
@click.option("--rival-option", "options", multiple=True, help="An option of both its programs, or its value.")
@click.option("--option", "ours", multiple=True, help="An option of both our verbs, or its value.")
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-c", "--ctx-size", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default="4,12", show_default=True, help="Windows of the shorter and the longer run.")
@click.option("--rounds", default=2, show_default=True, help="Runs of each, in turns; the best count.")
@click.option("--only", type=click.Choice(["perplexity", "imatrix"]), help="One of the two jobs.")
def windows(
    files: tuple[Path, ...],
    rival: Path | None,
    options: tuple[str, ...],
    ours: tuple[str, ...],
    text: Path,
    ctx_size: int,
    chunks: str,
    rounds: int,
    only: str | None,
) -> None:
    """Perplexity and imatrix on one thread: seconds of the processor of a whole job, and of one window more."""
    short, long = map(int, chunks.split(","))
    for path in files:
        for job in (only,) if only else ("perplexity", "imatrix"):
            asked = ["-m", str(path), "-f", str(text), "-c", str(ctx_size), "-t", "1"]
            if job == "imatrix":
                asked += ["-o", str(path.with_suffix(".imatrix"))]
            commands = {OURS: [*MILL, job, *asked, *ours, *(["--force"] if job == "imatrix" else [])]}
            if rival is not None:
                commands[RIVAL] = [str(rival / f"llama-{job}"), *asked, *options]
            measured([*commands[OURS], "--chunks", "1"])  # compiles kernels
            runs = [
                {(name, n): measured([*commands[name], "--chunks", str(n)]) for n in (short, long) for name in commands}
                for _ in range(rounds)
            ]
            whole, each = dict[str, float](), dict[str, float]()
            for name in commands:
                if failed := [run[key][3] for run in runs for key in run if key[0] == name and run[key][3]]:
                    raise click.ClickException(f"exit code {failed[0]}: {' '.join(commands[name])}")
                best = {n: min(run[name, n][1] for run in runs) for n in (short, long)}
                whole[name], each[name] = best[long], (best[long] - best[short]) / (long - short)
            said = f"{path.stem:24s} {job:10s}"
            for title, figures in ((f"{long} windows", whole), ("one more", each)):
                said += f"  {title}" + "".join(f" {name} {value:.2f} s" for name, value in figures.items())
                said += f" ratio {figures[RIVAL] / figures[OURS]:.2f}" if RIVAL in figures else ""
            click.echo(f"{said}  load {os.getloadavg()[0]:.0f}")


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
            out, by_way = np.empty((tokens, rows), np.float32), []
            for fast in (False, True):
                seconds = []
                for _ in range(rounds + 1):
                    start = time.thread_time()
                    plan, product = gemm.plan_gemm(q, tensor_type, columns, fast=fast), gemm.ProductList(1)
                    assert plan is not None
                    product.product(1, plan, product.blocks_of(0, plan.form, gemm.Activations(x)), out, gemm.one_job(tokens))
                    product.run(0)
                    seconds.append(time.thread_time() - start)
                by_way.append(f"{tokens * rows * columns / min(seconds) / 1e9:6.0f}")
            speeds.append(f"  {form}{''.join(by_way)}")
        click.echo(f"{tensor_type.name:12s}{''.join(speeds)}")


@main.command()
@click.argument("baseline", type=click.Path(exists=True, path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-c", "--ctx-size", default=512, show_default=True, help="Tokens of a window.")
@click.option("--chunks", default=4, show_default=True, help="Windows.")
def rounding(baseline: Path, files: tuple[Path, ...], text: Path, ctx_size: int, chunks: int) -> None:
    """KL divergences of each file: its own, from the baseline with products in full; from itself with products in full, of
    activations with a scale per 32 columns (as perplexities have it) and with `fast`; and from the baseline with both."""

    def predictions(path: Path, **settings: bool) -> np.ndarray:
        model = load_model(path, **settings)
        tokens = np.array(model.tokenizer.encode(text.read_text("utf-8"))[: chunks * ctx_size])
        logits = np.concatenate([model.logits(window) for window in tokens.reshape(chunks, -1)]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def divergence(p: np.ndarray, q: np.ndarray) -> str:
        each = (np.exp(p) * (p - q)).sum(axis=1)
        return f"{each.mean():.5f} ({np.median(each):.6f})"

    original = predictions(baseline, exact=True)
    for path in (baseline, *files):
        full, plain, fast = (predictions(path, **way) for way in ({"exact": True}, {}, {"fast": True}))
        figures = {"own": (original, full), "plain": (full, plain), "fast": (full, fast)}
        figures |= {"plain in all": (original, plain), "fast in all": (original, fast)}
        click.echo(f"{path.stem:16s}" + "".join(f"  {name} {divergence(*each)}" for name, each in figures.items()))


if __name__ == "__main__":
    main()
