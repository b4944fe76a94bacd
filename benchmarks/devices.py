"""What a device of torch does with this program, each figure against what it could do at best, or what the processor does.

    python benchmarks/devices.py [TYPE ...] [--device cuda] [--model FILE] [--only generation ...] [--no-tests] [--json]

tests       first of all, pytest of tests/quantize/torch_encoders and tests/runtime/backends/torch on the device; nothing is
            measured if one fails. --no-tests leaves them out
generation  one vector times a matrix: bytes of weights per second over those of a copy on the device (aim: 70 %). So that
            weights come from memory and not from a cache, as many matrices as make --megabytes are multiplied in turn; on CUDA
            their launches are recorded and replayed, as those of generated tokens are
prompt      --tokens vectors; operations per second over those of torch's product of bf16 matrices of these sizes (aim: 50 %)
encoding    weights per second, from the processor's memory and back, over those of the program's encoder with one thread (aim:
            50 times), both with importance
whole       generation and prompts of a model of random weights of --whole-type that is made on the spot, twelve layers of the
            size of those of Llama 3 8B: tokens per second, and bytes of weights per second over those of the copy
model       a model's prompt and generation in tokens per second, and its perplexity with divergence and agreement, against the
            program's own backend on the processor

Without --device it is cuda where torch has it, else the processor, on which the figures only show that the script works; sizes
are small there. What is compared is timed in turn, once per round, after a round that is not counted, which compiles kernels;
figures are medians over the rounds, +- half the distance of the quartiles. Memory's bandwidth and the speed of bf16 products,
with which it is compared, are printed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import models
import numpy as np
import torch

import ggufmill
from ggufmill import quantize
from ggufmill.formats import TYPES
from ggufmill.quantize.plain_rows import GPU_TYPES
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch.decode import PackedMatrix
from ggufmill.runtime.backends.torch.triton import kernels_of

ROOT = Path(__file__).parents[1]
TESTS = "tests/quantize/torch_encoders", "tests/runtime/backends/torch"
_K_QUANTS, _IQK = ("q2_K", "q4_K", "q6_K"), ("iq2_k", "iq4_k", "iq4_ks", "iq4_kss")
TYPES_MEASURED = ("q4_0", "q8_0", *_K_QUANTS, "iq4_xs", *_IQK, "mxfp4", "iq3_s", "iq2_kt")
AIMS = {"generation": 0.7, "prompt": 0.5, "encoding": 50.0}
SIZES = {
    "columns": 4096,
    "rows": 14336,
    "tokens": 512,
    "megabytes": 1024,
    "encoded": 1 << 24,
    "rounds": 7,
    "types": TYPES_MEASURED,
}
SIZES_ON_CPU = {"columns": 1024, "rows": 512, "tokens": 32, "megabytes": 4, "encoded": 1 << 15, "rounds": 3}
SIZES_ON_CPU["types"] = ("q8_0", "q4_K", "iq4_k")
_ENCODED_BY_CPU = 1 << 21  # weights at most: a second or less of the slowest encoder


class Figure(NamedTuple):
    """Median over rounds, and half the distance of the quartiles."""

    median: float
    noise: float

    @classmethod
    def of(cls, samples: np.ndarray) -> Figure:
        low, middle, high = np.quantile(samples, [0.25, 0.5, 0.75])
        return cls(float(middle), float(high - low) / 2)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call, until the device is done."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as a graph of CUDA, whose replay takes no time of the processor's; on other devices the work itself."""
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def rates(amounts: tuple[float, float], works: tuple[Callable[[], object], Callable[[], object]], o) -> dict[str, Figure]:
    """Two works timed in turn: amount / seconds of the first (rate), of the second (reference), and their ratio."""
    times = np.array([[seconds(work, o.device) for work in works] for _ in range(o.rounds + 1)])[1:]
    rate, reference = (amounts / times).T
    return {"ratio": Figure.of(rate / reference), "rate": Figure.of(rate), "reference": Figure.of(reference)}


def packed_matrix(name: str, o: argparse.Namespace, matrices: int = 1) -> PackedMatrix:
    """Random weights: a few rows encoded and repeated, so that scales are ordinary."""
    kind = TYPES[name]
    few = max(kind.rows, 16)
    x = np.random.default_rng(1).standard_normal((few, o.columns)).astype(np.float32)
    q = torch.from_numpy(quantize.encode(x, name, np.ones(o.columns, np.float32))).reshape(-1).to(o.device)
    rows = o.rows // few * few
    return PackedMatrix(name, o.columns, rows, matrices, q.repeat(matrices * rows // few))


def generation(name: str, o: argparse.Namespace) -> dict[str, Figure]:
    """Rates in bytes per second."""
    one = TYPES[name].row_bytes(o.columns) * o.rows
    matrices = max(1, -(-o.megabytes * 2**20 // one))
    matrix = packed_matrix(name, o, matrices)
    x = torch.randn(1, o.columns, device=o.device, dtype=o.dtype)
    other = torch.empty_like(matrix.data)

    def all_matrices() -> None:
        for number in range(matrices):
            matrix.matmul(x, o.dtype, number)

    return rates((matrix.nbytes, 2 * matrix.nbytes), (recorded(all_matrices, o.device), lambda: other.copy_(matrix.data)), o)


def prompt(name: str, o: argparse.Namespace) -> dict[str, Figure]:
    """Rates in operations per second."""
    matrix = packed_matrix(name, o)
    x = torch.randn(o.tokens, o.columns, device=o.device, dtype=torch.bfloat16)
    dense = torch.randn(matrix.rows_per_matrix, o.columns, device=o.device, dtype=torch.bfloat16)
    operations = 2.0 * o.tokens * dense.numel()
    return rates((operations, operations), (lambda: matrix.matmul(x, torch.bfloat16), lambda: x @ dense.T), o)


def encoding(name: str, o: argparse.Namespace) -> dict[str, Figure] | None:
    """Rates in weights per second; None for types without an encoder for devices."""
    if TYPES.plain(TYPES[name]).name not in GPU_TYPES:
        return None
    rng = np.random.default_rng(2)
    importance = rng.chisquare(4, o.columns).astype(np.float32)
    rows = -(-o.encoded // o.columns // 16) * 16
    x = (0.02 * rng.standard_t(5, (rows, o.columns))).astype(np.float32)  # larger ones the processor scales for some types
    few = x[: max(16, _ENCODED_BY_CPU // o.columns // 16 * 16)]

    def on_device() -> None:
        quantize.encode(x, name, importance, device=str(o.device))

    def by_cpu() -> None:
        quantize.encode(few, name, importance)

    return rates((x.size, few.size), (on_device, by_cpu), o)


MEASURE = {"generation": generation, "prompt": prompt, "encoding": encoding}


def model_figures(o: argparse.Namespace) -> dict[str, Any]:
    """Speeds of a model on the device and with the program's own backend, and how far predictions are apart."""
    figures: dict[str, Any] = {"model": str(o.model)}
    for name, placement in (("device", {"device": str(o.device)}), ("processor", {})):
        bench = ggufmill.benchmark(o.model, n_prompt=o.prompt, n_gen=o.generated, repetitions=o.rounds, **placement)
        for what, row in zip(("prompt", "generation"), bench.rows, strict=True):
            figures[f"{what} on {name}"] = Figure.of(np.array(row.samples))
    result = ggufmill.perplexity(
        load_model(o.model, n_ctx=o.context, device=str(o.device)), o.text, n_ctx=o.context, chunks=o.chunks,
        kl_divergence=load_model(o.model, n_ctx=o.context),
    )  # fmt: skip
    for name in ("perplexity", "error", "ratio", "kld_mean", "top1_agreement", "tokens_scored"):
        figures[name] = getattr(result, name)
    return figures


def whole_figures(o: argparse.Namespace) -> dict[str, Any]:
    """Speeds of a model that is made on the spot, and the share of a copy's bandwidth that its weights are read with."""
    on_cpu = o.device.type == "cpu"
    size = models.Size(2, 256, 512, 4, 2) if on_cpu else models.Size(12, 4096, 14336, 32, 8, vocabulary=32000)
    with tempfile.TemporaryDirectory() as folder:
        path = models.write_model(Path(folder) / f"whole-{o.whole_type}.gguf", size, o.whole_type)
        tokens, generated = (32, 4) if on_cpu else (o.tokens, 64)
        bench = ggufmill.benchmark(path, n_prompt=tokens, n_gen=generated, repetitions=o.rounds, device=str(o.device))
        weights = path.stat().st_size - 2 * size.n_embd * size.vocabulary  # but the embeddings, which are looked up
    a = torch.empty(1 << (20 if on_cpu else 30), dtype=torch.uint8, device=o.device)
    b = torch.empty_like(a)
    copies = np.array([2 * a.numel() / seconds(lambda: b.copy_(a), o.device) for _ in range(o.rounds + 1)])[1:]
    speeds = [Figure.of(np.array(row.samples)) for row in bench.rows]
    share = speeds[1].median * weights / float(np.median(copies))
    return {"weights": weights, "prompt": speeds[0], "generation": speeds[1], "share": share}


def run_tests(device: torch.device) -> str:
    """The last line of pytest on the device. Ends the program if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    environment = os.environ | {"GGUFMILL_TORCH_DEVICE": str(device)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\ntests fail on {device}: nothing is measured (--no-tests measures all the same)")
    return done.stdout.strip().splitlines()[-1]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("columns", "rows", "tokens", "megabytes", "encoded", "rounds"):
        parser.add_argument(f"--{name}", type=int, help=f"{SIZES[name]}, on the processor {SIZES_ON_CPU[name]}")
    parser.add_argument("--model", type=Path, default=FOLDER / "demo", help="GGUF file or checkpoint; a tiny one comes along")
    parser.add_argument("--text", type=Path, default=FOLDER / "demo" / "heldout.txt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of prompts")
    parser.add_argument("--generated", type=int, default=16, help="tokens of generations")
    parser.add_argument("--context", type=int, default=128, help="tokens of the windows of perplexity")
    parser.add_argument("--chunks", type=int, default=4, help="windows of perplexity")
    parser.add_argument("--whole-type", default="q4_K", help="tensor type of the model that is made on the spot")
    parser.add_argument("--only", choices=[*AIMS, "whole", "model"], action="append")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args(arguments)
    o.device = torch.device(o.device)
    o.dtype = torch.float32 if o.device.type == "cpu" else torch.bfloat16
    for name, value in (SIZES_ON_CPU if o.device.type == "cpu" else SIZES).items():
        if not getattr(o, name):
            setattr(o, name, value)
    return o


def text_of(figures: dict[str, Figure] | None) -> str:
    return "" if figures is None else f"{figures['ratio'].median:.3g} ±{figures['ratio'].noise:.2g}"


def main(arguments: list[str] | None = None) -> None:
    o = parsed(arguments)
    chosen = o.only or [*AIMS, "whole", "model"]
    kinds = [what for what in AIMS if what in chosen]
    where = torch.cuda.get_device_name(o.device) if o.device.type == "cuda" else str(o.device)
    report: dict[str, Any] = {"device": where, "torch": torch.__version__, "rounds": o.rounds, "aims": AIMS, "results": []}
    report["tests"] = None if o.no_tests else run_tests(o.device)

    def say(line: str) -> None:
        if not o.json:
            print(line, flush=True)

    say(f"{where}, torch {torch.__version__}, {o.rounds} rounds; tests: {report['tests'] or 'left out'}")
    say(f"aims: {', '.join(f'{what} {AIMS[what]:g}' for what in kinds)}")
    say(f"{'type':10}{'kernels':>9}" + "".join(f"{what:>18}" for what in kinds))
    best: dict[str, list[float]] = {"generation": [], "prompt": []}
    for name in o.types if kinds else ():
        kernels = "triton" if kernels_of(name, o.device) is not None else "torch"
        figures = {what: MEASURE[what](name, o) for what in kinds}
        report["results"].append({"type": name, "kernels": kernels, **{k: as_json(f) for k, f in figures.items()}})
        say(f"{name:10}{kernels:>9}" + "".join(f"{text_of(f):>18}" for f in figures.values()))
        for what in best.keys() & figures.keys():
            best[what].append(figures[what]["reference"].median)
    if best["generation"]:
        report["copy_bytes_per_second"] = max(best["generation"])
        say(f"copies on the device: {max(best['generation']) / 1e9:.1f} GB/s")
    if best["prompt"]:
        report["bf16_operations_per_second"] = max(best["prompt"])
        say(f"torch's bf16 products: {max(best['prompt']) / 1e12:.3f} TFLOP/s")
    if "whole" in chosen:
        figures = whole_figures(o)
        report["whole"] = as_json(figures)
        for what in ("prompt", "generation"):
            speed = f"{figures[what].median:.1f} ±{figures[what].noise:.1f} tokens/s"
            say(f"{what} of {figures['weights'] / 1e9:.2f} GB in {o.whole_type}: {speed}")
        say(f"that is {figures['share']:.3g} of a copy's bandwidth (aim: {AIMS['generation']:g})")
    if "model" in chosen:
        figures = model_figures(o)
        report["model"] = as_json(figures)
        for what in ("prompt on device", "prompt on processor", "generation on device", "generation on processor"):
            say(f"{what}: {figures[what].median:.1f} ±{figures[what].noise:.1f} tokens/s")
        say(
            f"perplexity {figures['perplexity']:.4f}, {figures['ratio']:.5f} times the processor's; "
            f"KL divergence {figures['kld_mean']:.2e}, top token agrees for {figures['top1_agreement']:.1f} %"
        )
    if o.json:
        print(json.dumps(report, indent=1))


def as_json(value: Any) -> Any:
    """Figures as {"median", "noise"}."""
    if isinstance(value, Figure):
        return value._asdict()
    return {name: as_json(each) for name, each in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
