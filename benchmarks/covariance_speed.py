"""How fast rows are encoded with a covariance: microseconds per weight on one thread, by type, row length and effort.

    python benchmarks/covariance_speed.py --columns 2048 7168 --types q4_K iq2_k --efforts 1 2

The covariance is that of random inputs with an effective rank of an eighth of the columns. `prepare` is what one matrix costs
once; the last column extrapolates the figure to 671e9 weights on 64 threads, as if they did not slow each other down. Times are
processor time of the thread.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.covariance_matrix import Covariance
from ggufmill.quantize.covariance.prepared import prepare

WEIGHTS, THREADS = 671e9, 64


def covariance(n: int) -> Covariance:
    """That of 2 n inputs: n / 8 sources, mixed, and noise."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((n // 8, n), dtype=np.float32) / np.float32(np.sqrt(n // 8))
    h = np.zeros((n, n), np.float32)
    for _ in range(4):
        x = rng.standard_normal((n // 2, n // 8), dtype=np.float32) @ mixing
        x += np.float32(0.3) * rng.standard_normal((n // 2, n), dtype=np.float32)
        h += x.T @ x
    h /= np.float32(2 * n)
    return Covariance((h + h.T) / np.float32(2), 10 * n)


def error(x: np.ndarray, q: np.ndarray, type_name: str, h: np.ndarray) -> float:
    """The sum of r h r^T over the rows of x, r being a row minus what it decodes to."""
    r = x - decode(q, type_name, x.shape[1])
    return float(((r @ h) * r).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--types", nargs="+", default=["q4_K", "q3_K", "iq4_k", "iq2_k", "iq4_ks", "q4_0"])
    parser.add_argument("--efforts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    print(f"{'type':8} {'columns':>7} {'effort':>6} {'us/weight':>9} {'ordinary':>9} {'error':>6} {'hours':>7}")
    for n in options.columns:
        collected = covariance(n)
        prepare(covariance(256))  # compiles
        started = time.thread_time()
        prepared = prepare(collected)
        print(f"prepare  {n:7}        {time.thread_time() - started:9.2f} s")
        h = collected.damped()
        x = np.random.default_rng(1).standard_normal((options.rows, n), dtype=np.float32) * np.float32(0.02)
        for type_name in options.types:
            encode(x[:16], type_name, collected.diagonal)
            started = time.thread_time()
            q = encode(x, type_name, collected.diagonal)
            ordinary, before = (time.thread_time() - started) / x.size, error(x, q, type_name, h)
            for effort in options.efforts:
                encode(x[:16], type_name, covariance=prepared, effort=effort)
                started = time.thread_time()
                q = encode(x, type_name, covariance=prepared, effort=effort)
                seconds = (time.thread_time() - started) / x.size
                hours, left = seconds * WEIGHTS / THREADS / 3600, error(x, q, type_name, h) / before
                figures = f"{seconds * 1e6:9.3f} {ordinary * 1e6:9.3f} {left:6.3f} {hours:7.2f}"
                print(f"{type_name:8} {n:7} {effort:6} {figures}", flush=True)


if __name__ == "__main__":
    main()
