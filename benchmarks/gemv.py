"""Matrix-vector products on packed weights, from memory: bytes per second against what the machine reads at best.

    python benchmarks/gemv.py [TYPE ...] [--threads 1 2] [--tokens 1] [--megabytes 512] [--json]

Every type multiplies random packed rows, --megabytes of them, so that weights come from memory and not from a cache (mind the
size of the last-level cache). `share` is bytes per second over those of a plain sum of the same bytes with as many threads,
measured alternately with each product. `cycles` is what 256 weights take from a second-level cache: what arithmetic takes.
`cycles_of_memory` is what the plain sum takes to read them from memory; the larger of the two bounds the type. `decode` is the
time of decoding the same rows to float32 over that of the product: the least that a product of decoded rows costs. Times are
processor time of the slowest thread, so that other processes disturb less; these still use memory bandwidth, and threads that
never run at the same time do not compete for it: measure several threads on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from peak import read_all

from ggufmill.formats import TYPES
from ggufmill.quantize import decode
from ggufmill.runtime.backends.cpu.kernels.activations import RUN, quantise_run
from ggufmill.runtime.backends.cpu.kernels.gemv.gemv import gemv, run_parts
from ggufmill.runtime.backends.cpu.kernels.gemv_plan import GemvPlan
from ggufmill.simd.compile import kernel
from ggufmill.simd.memory import aligned_empty

TARGETS = ("bf16", "bf16_r16", "f16", "f32", "q8_0", "q8_0_r8", "q4_K", "q4_k_r4", "iq4_k", "iq4_k_r4", "iq4_ks", "iq4_ks_r4",
           "iq2_k", "iq2_k_r4")  # fmt: skip
COLUMNS = 4096
_CACHED = 300 << 10  # bytes, of rows of half as many columns, but at least 64 rows: second-level caches have 512 KiB and more


def run_on_threads(work: Callable[[int, int], object], parts: int, threads: int) -> float:
    """Processor seconds of the slowest of `threads` threads, among which `parts` parts of work(first, stop) are divided."""
    cuts = [parts * i // threads for i in range(threads + 1)]
    seconds = []

    def timed(first: int, stop: int) -> None:
        begin = time.thread_time()
        work(first, stop)
        seconds.append(time.thread_time() - begin)

    workers = [threading.Thread(target=timed, args=cut) for cut in pairwise(cuts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(seconds)


class Product:
    """One type's product with `memory` as its weights, in slices of 64 rows."""

    def __init__(self, name: str, memory: np.ndarray, tokens: int, columns: int = COLUMNS):
        product = gemv(name)
        assert product is not None
        self.name, self.product, self.columns = name, product, columns
        row_bytes = self.row_bytes = TYPES[name].row_bytes(columns)
        rows = len(memory) // row_bytes // 64 * 64
        self.bytes, self.slices = rows * row_bytes, rows // 64
        x = aligned_empty((tokens, columns), np.float32)
        x[:] = np.random.default_rng(1).standard_normal(x.shape)
        inputs = [x]
        if product.activations:  # codes, scales and sums
            kinds = ((1, np.uint8), (product.activations, np.float32), (RUN, np.int16))
            inputs = [aligned_empty((x.size // run,), kind) for run, kind in kinds]
            quantise_run(x.reshape(-1), product.activations, *inputs)
        codes, scales, sums = ([a.ctypes.data for a in inputs] + [0, 0])[:3]
        out, jobs = np.empty((tokens, rows), np.float32), np.array([[0, 0, tokens, 0]], np.int64)
        self.arrays = (memory, inputs, out, jobs)
        plan = GemvPlan(product, memory.ctypes.data, 0, row_bytes, rows, columns, self.slices, self.slices)
        begin = time.perf_counter()
        self.address = product.address
        table = plan.table((codes, scales, sums), out.ctypes.data, rows, jobs.ctypes.data, several=tokens > 1)
        self.compile = time.perf_counter() - begin
        self.table = np.array(table, np.int64)

    def __call__(self, first: int, stop: int) -> None:
        run_parts(self.address, self.table.ctypes.data, first, stop)

    def decode_seconds_per_byte(self) -> float:
        """Processor seconds per byte of decoding 8 MiB of the rows to float32, on one thread."""
        row_bytes = self.row_bytes
        rows = self.arrays[0][: (8 << 20) // row_bytes // 16 * 16 * row_bytes].reshape(-1, row_bytes)
        decode(rows, self.name, self.columns)
        begin = time.thread_time()
        decode(rows, self.name, self.columns)
        return (time.thread_time() - begin) / rows.nbytes


def cycles_per_second(steps: int = 1 << 24) -> float:
    """Of a core of x86, where a multiplication and an exclusive or that wait for each other take four cycles."""
    _chain(1)
    seconds = []
    for _ in range(5):
        begin = time.thread_time()
        _chain(steps)
        seconds.append(time.thread_time() - begin)
    return 4 * steps / min(seconds)


@kernel
def _chain(steps):
    value = np.uint64(1)
    for i in range(steps):
        value = value * np.uint64(6364136223846793005) ^ np.uint64(i)
    return value


def seconds_in_cache(name: str, memory: np.ndarray, tokens: int, repeats: int = 40) -> float:
    """Processor seconds per weight of a product with rows that fit a second-level cache, the least of many."""
    columns = COLUMNS // 2
    product = Product(name, memory[: max(_CACHED, 64 * TYPES[name].row_bytes(columns))], tokens, columns)
    product(0, product.slices)
    seconds = []
    for _ in range(repeats):
        begin = time.thread_time()
        product(0, product.slices)
        seconds.append(time.thread_time() - begin)
    return min(seconds) / (product.bytes // product.row_bytes * columns)


def measure(name: str, memory: np.ndarray, tokens: int, threads: int, clock: float, repeats: int = 5) -> dict:
    """Medians over `repeats` rounds, in each of which the product and the plain sum alternate."""
    product = Product(name, memory, tokens)
    words = memory[: product.bytes // 8 * 8].view(np.int64)

    def read(first: int, stop: int) -> None:
        read_all(words[len(words) * first // threads : len(words) * stop // threads])

    product(0, 1), read_all(words[:8])
    rates, shares = [], []
    for _ in range(repeats):
        best = product.bytes / run_on_threads(read, threads, threads) / 1e9
        rates.append(product.bytes / run_on_threads(product, product.slices, threads) / 1e9)
        shares.append(rates[-1] / best)
    rate, weights = float(np.median(rates)), product.bytes / product.row_bytes * COLUMNS
    block = 256 * clock  # cycles of 256 weights for each second of one
    cycles = {
        "cycles": round(seconds_in_cache(name, memory, tokens) * block, 1),
        "cycles_of_memory": round(product.bytes / weights / (rate / float(np.median(shares)) * 1e9 / threads) * block, 1),
    }
    return {
        "type": name,
        "threads": threads,
        "tokens": tokens,
        "gigabytes_per_second": round(rate, 2),
        "share": round(float(np.median(shares)), 3),
        "lowest_share": round(min(shares), 3),
        **cycles,
        "giga_products_per_second": round(rate * weights / product.bytes * tokens, 1),
        "decode": round(product.decode_seconds_per_byte() * rate * 1e9 / threads, 1),
        "compile_seconds": round(product.compile, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=TARGETS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    # Small floats whatever they are read as: no time is lost on denormals or on NaN.
    memory = np.tile(rng.integers(20, 60, 1 << 20, np.uint8), options.megabytes)
    clock = cycles_per_second()
    rows = [measure(name, memory, options.tokens, threads, clock) for name in options.types for threads in options.threads]
    if options.json:
        json.dump(
            {"columns": COLUMNS, "megabytes": options.megabytes, "gigahertz": round(clock / 1e9, 2), "rows": rows},
            sys.stdout,
            indent=1,
        )
        return
    print(" | ".join(["| type", *list(rows[0])[1:], ""]))
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
