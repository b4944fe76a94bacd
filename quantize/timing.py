"""How long a plan would take here, from a short sample of every encoder that it uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..formats import TYPES, TensorType
from ..jobs.plan import Output, Plan
from .codecs.registry import encode

SAMPLE = 1 << 16  # weights encoded at a time
SECONDS = 0.1  # a type is timed for
COPY_SPEED = 2e9  # bytes per second of what is only copied or permuted: a guess, since the disk decides


def elements_per_second(kind: TensorType, threads: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Of so many threads at once encoding random rows with importance; a first call, which may compile, does not count."""
    columns = max(512, kind.block)
    rows = max(kind.rows, SAMPLE // columns // kind.rows * kind.rows)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, columns)).astype(np.float32) * 0.02
    weights = None if kind.is_float else (draw.chisquare(2, columns) + 0.01).astype(np.float32)
    encode(x[: kind.rows], kind.name, weights)
    began = clock()

    def work(_: int) -> int:
        count = 0
        while count == 0 or clock() - began < SECONDS:
            encode(x, kind.name, weights)
            count += 1
        return count

    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(work, range(threads)))
    return count * x.size / max(clock() - began, 1e-9)


def copied(output: Output) -> bool:
    """Whether the tensor is taken over without encoding: the same type, or its interleaved twin."""
    if output.source_type not in TYPES:
        return False
    source = TYPES[output.source_type]
    return (source.base or source.name) == (output.type.base or output.type.name)


def predict(plan: Plan, threads: int) -> dict[str, float]:
    """Seconds by type name on so many threads; what is copied under 'copy'. Reading from a slow disk comes on top."""
    work: dict[str, int] = {}
    copying = 0
    for output in plan.outputs:
        if copied(output):
            copying += output.nbytes
        else:
            work[output.type.name] = work.get(output.type.name, 0) + output.n_elements
    found = {name: n / elements_per_second(TYPES[name], threads) for name, n in work.items()}
    if copying:
        found["copy"] = copying / COPY_SPEED
    return found
