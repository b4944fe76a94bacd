"""How fast rows are encoded with a covariance and a curvature: microseconds per weight on one thread.

\\b
    python benchmarks/imatrix/covariance_speed.py --columns 2048 7168 18432 --types q4_K iq2_k iq2_xxs --efforts 1 2 --rows 1024

By type, row length and effort: with the covariance H of inputs alone, with the curvature of the outputs of all --rows (a block)
too, and both over each other. H is that of random inputs with an effective rank of 256, A of one of an eighth of the rows.
`prepare` is what the H of one matrix costs once. The hours are those of 671e9 weights on 64 threads, as if they did not slow
each other down, without `prepare`. Times are processor time of the thread, the least of --rounds. Memory is that of H with
what is kept of it, once, and what the process took for a block beside it at most.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np

from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.coupling import CoupledRows, couple
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance, SecondMoments
from ggufmill.quantize.covariance.matrix.panels import WIDTH
from ggufmill.quantize.covariance.matrix.prepared import PreparedCovariance, prepare
from ggufmill.simd.workers import Workers

WEIGHTS, THREADS, RANK, NOISE = 671e9, 64, 256, 0.1


class RandomMoments(SecondMoments):
    """F F^T + 0.1, F float32 [columns, 256]: made where it is read, so that its panels are all that it takes."""

    def __init__(self, columns: int):
        rank = min(RANK, columns // 8)
        self.factors = np.random.default_rng(0).standard_normal((columns, rank), np.float32) / np.float32(np.sqrt(rank))
        self.tokens = 10 * columns

    @property
    def diagonal(self) -> np.ndarray:
        return np.square(self.factors).sum(1) + np.float32(NOISE)

    def check(self) -> None:
        pass

    def write_panels(self, panels: np.ndarray, workers: Workers) -> None:
        panels[:] = 0
        for i, panel in enumerate(panels):
            part = self.factors[i * WIDTH : (i + 1) * WIDTH]
            panel[: len(self.factors), : len(part)] = self.factors @ part.T

    def error(self, r: np.ndarray) -> float:
        """The sum of r H r^T, H damped, over rows r."""
        more = self.damped_diagonal().astype(np.float64) - np.square(self.factors).sum(1)
        return float(np.square(r @ self.factors).sum(dtype=np.float64) + (np.square(r.astype(np.float64)) @ more).sum())


def curvature(rows: int) -> CoupledRows:
    """Of gradients that come from an eighth as many sources, with noise."""
    rng = np.random.default_rng(2)
    factors = rng.standard_normal((rows, max(1, rows // 8)), np.float32) / np.float32(np.sqrt(max(1, rows // 8)))
    coupled = couple(Covariance(factors @ factors.T + np.float32(NOISE) * np.eye(rows, dtype=np.float32), 100 * rows))
    assert coupled is not None
    return coupled


def least(run: Callable[[], np.ndarray], weights: int, rounds: int) -> tuple[np.ndarray, float]:
    """What it gives, and microseconds per weight, of processor time."""
    seconds, result = [], np.empty(0)
    for _ in range(rounds):
        started = time.thread_time()
        result = run()
        seconds.append(time.thread_time() - started)
    return result, min(seconds) / weights * 1e6


def hours(microseconds: float) -> float:
    return microseconds * 1e-6 * WEIGHTS / THREADS / 3600


def peak() -> float:
    """GB that the process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(type_name: str, effort: int, x: np.ndarray, prepared: PreparedCovariance, coupled: CoupledRows, rounds: int) -> str:
    """A line of one type, row length and effort."""
    moments_of = {"covariance": prepared, "effort": effort}
    encode(x[:16], type_name, **moments_of)  # compiles
    encode(x[:32], type_name, coupled=curvature(32), **moments_of)
    q, ordinary = least(lambda: encode(x, type_name, prepared.importance), x.size, rounds)
    refined, alone = least(lambda: encode(x, type_name, **moments_of), x.size, rounds)
    _, together = least(lambda: encode(x, type_name, coupled=coupled, **moments_of), x.size, rounds)
    after, before = (RandomMoments(x.shape[1]).error(x - decode(each, type_name, x.shape[1])) for each in (refined, q))
    figures = f"{ordinary:8.3f} {alone:8.3f} {together:8.3f} {together / alone:6.2f} {after / before:6.3f}"
    return f"{type_name:8} {x.shape[1]:7} {effort:6} {figures} {hours(alone):7.2f} {hours(together):7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--types", nargs="+", default=["q4_K", "q3_K", "iq4_k", "iq2_k", "iq4_ks", "q4_0"])
    parser.add_argument("--efforts", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print("type     columns effort ordinary        H    A, H  ratio  error   hours of H, of A and H")
    for columns in options.columns:
        moments = RandomMoments(columns)
        started = time.thread_time()
        prepared = prepare(moments)
        assert prepared.damped is not None
        _ = prepared.damped.triangle
        print(f"prepare  {columns:7}        {time.thread_time() - started:9.2f} s, {prepared.nbytes / 1e9:.2f} GB", flush=True)
        x = np.random.default_rng(1).standard_normal((options.rows, columns), dtype=np.float32) * np.float32(0.02)
        before = peak()
        for type_name in options.types:
            for effort in options.efforts:
                print(measure(type_name, effort, x, prepared, curvature(options.rows), options.rounds), flush=True)
        print(f"memory   {columns:7}        {peak() - before:9.2f} GB for blocks of {x.size / 1e6:.1f} M weights", flush=True)


if __name__ == "__main__":
    main()
