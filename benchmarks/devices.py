"""Products of packed weights and encoders on a device of torch, each against what the device could do at best.

    python benchmarks/devices.py [TYPE ...] [--device cuda] [--columns 4096] [--rows 14336] [--only generation] [--json]

generation: one vector times a matrix; bytes of weights per second over those of a copy on the device (aim: 70 %). So that
            weights come from memory and not from a cache, as many matrices as make --megabytes are multiplied in turn.
prompt:     --tokens vectors; operations per second over those of torch's product of bf16 matrices of these sizes (aim: 50 %)
encoding:   weights per second, from the processor's memory and back, over those of the program's encoder with one thread (aim:
            50 times), both with importance

Without --device it is cuda where torch has it, else the processor, on which the figures only show that the script works. Each
figure is the median of --repeats runs after one that is not counted, which compiles kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ggufmill import quantize
from ggufmill.formats import TYPES
from ggufmill.quantize.devices.encode import TYPES_ON_DEVICES
from ggufmill.runtime.backends.torch.decode import PackedMatrix
from ggufmill.runtime.backends.torch.triton import kernels_of

DEFAULTS = ("q4_0", "q8_0", "q2_K", "q4_K", "q6_K", "iq4_xs", "iq2_k", "iq4_k", "iq4_ks", "mxfp4", "iq3_s", "iq2_kt")
AIMS = {"generation": 0.7, "prompt": 0.5, "encoding": 50.0}
_ENCODED_BY_CPU = 1 << 21  # weights: a second or less of the slowest encoder


def seconds(work: Callable[[int], object], device: torch.device, repeats: int) -> float:
    """Median time of work(run), until the device is done."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    times = []
    for run in range(repeats + 1):
        wait()
        begin = time.perf_counter()
        work(run)
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def packed_matrix(name: str, o: argparse.Namespace, matrices: int = 1) -> PackedMatrix:
    """Random weights: a few rows encoded and repeated, so that scales are ordinary."""
    kind = TYPES[name]
    few = max(kind.rows, 16)
    x = np.random.default_rng(1).standard_normal((few, o.columns)).astype(np.float32)
    q = torch.from_numpy(quantize.encode(x, name, np.ones(o.columns, np.float32))).reshape(-1).to(o.device)
    rows = o.rows // few * few
    return PackedMatrix(name, o.columns, rows, matrices, q.repeat(matrices * rows // few))


def generation(name: str, o: argparse.Namespace) -> float:
    one = TYPES[name].row_bytes(o.columns) * o.rows
    matrices = max(1, -(-o.megabytes * 2**20 // one))
    matrix = packed_matrix(name, o, matrices)
    x = torch.randn(1, o.columns, device=o.device, dtype=o.dtype)

    def all_matrices(run: int) -> None:
        for number in range(matrices):
            matrix.matmul(x, o.dtype, number)

    rate = matrix.nbytes / seconds(all_matrices, o.device, o.repeats)
    other = torch.empty_like(matrix.data)
    copied = 2 * matrix.nbytes / seconds(lambda run: other.copy_(matrix.data), o.device, o.repeats)
    return rate / copied


def prompt(name: str, o: argparse.Namespace) -> float:
    matrix = packed_matrix(name, o)
    x = torch.randn(o.tokens, o.columns, device=o.device, dtype=torch.bfloat16)
    dense = torch.randn(matrix.rows_per_matrix, o.columns, device=o.device, dtype=torch.bfloat16)
    at_best = seconds(lambda run: x @ dense.T, o.device, o.repeats)
    return at_best / seconds(lambda run: matrix.matmul(x, torch.bfloat16), o.device, o.repeats)


def encoding(name: str, o: argparse.Namespace) -> float | None:
    if TYPES.plain(TYPES[name]).name not in TYPES_ON_DEVICES:
        return None
    rng = np.random.default_rng(2)
    importance = rng.chisquare(4, o.columns).astype(np.float32)
    rows = -(-o.encoded // o.columns // 16) * 16
    x = rng.standard_t(5, (rows, o.columns)).astype(np.float32)
    few = x[: max(16, _ENCODED_BY_CPU // o.columns // 16 * 16)]
    cpu = few.size / seconds(lambda run: quantize.encode(few, name, importance), torch.device("cpu"), o.repeats)
    return x.size / seconds(lambda run: quantize.encode(x, name, importance, device=str(o.device)), o.device, o.repeats) / cpu


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=DEFAULTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--encoded", type=int, default=1 << 24, help="weights that are encoded on the device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(AIMS), action="append")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args(arguments)
    o.device = torch.device(o.device)
    o.dtype = torch.float32 if o.device.type == "cpu" else torch.bfloat16
    measure = {"generation": generation, "prompt": prompt, "encoding": encoding}
    chosen = o.only or list(AIMS)
    where = torch.cuda.get_device_name(o.device) if o.device.type == "cuda" else str(o.device)
    results = []
    if not o.json:
        print(f"{where}, torch {torch.__version__}: aims {', '.join(f'{what} {AIMS[what]:g}' for what in chosen)}")
        print(f"{'type':10}{'kernels':>9}" + "".join(f"{what:>14}" for what in chosen))
    for name in o.types:
        kernels = "triton" if kernels_of(name, o.device) is not None else "torch"
        figures = {what: measure[what](name, o) for what in chosen}
        results.append({"type": name, "kernels": kernels, **figures})
        if not o.json:
            texts = ("" if f is None else f"{f:.3f}" for f in figures.values())
            print(f"{name:10}{kernels:>9}" + "".join(f"{text:>14}" for text in texts), flush=True)
    if o.json:
        print(json.dumps({"device": where, "torch": torch.__version__, "aims": AIMS, "results": results}, indent=1))


if __name__ == "__main__":
    main()
