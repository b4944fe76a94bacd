"""How long a plan would take on this machine, extrapolated from a short run of each encoder that it uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from ..formats import TYPES, TensorType
from ..jobs.outputs import Output, OutputKind
from ..jobs.plan import Plan
from .encode import encode

SAMPLE = 1 << 16  # weights per call of an encoder
REST = 0.9e-9  # seconds of a thread for reading, decoding, checking and writing a weight (fp8, bf16 to q8_0; Zen 5)
SECONDS = 0.1  # duration of the measurement of one type
COPY_SPEED = 2e9  # bytes per second of tensors that are copied or repacked: a guess, since the disk decides


def encode_speed(tensor_type: TensorType, threads: int = 1, clock: Callable[[], float] = time.thread_time) -> float:
    """Weights per second that `threads` threads together encode to this type, on a machine that does nothing else: random
    rows, with importance.

    The first call, which may compile kernels, is not timed. clock: seconds of the thread's own, as time.thread_time.
    """
    columns = max(512, tensor_type.block)
    rows = max(tensor_type.rows, SAMPLE // columns // tensor_type.rows * tensor_type.rows)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns)).astype(np.float32) * 0.02
    importance = None if tensor_type.is_float else (rng.chisquare(2, columns) + 0.01).astype(np.float32)
    encode(x[: tensor_type.rows], tensor_type.name, importance)

    def work(_: int) -> float:
        calls, started = 0, clock()
        while calls == 0 or clock() - started < SECONDS:
            encode(x, tensor_type.name, importance)
            calls += 1
        return calls * x.size / max(clock() - started, 1e-9)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def is_copied(output: Output | OutputKind) -> bool:
    """Whether a tensor's bytes are copied or repacked instead of encoded: the types are equal or share a base type."""
    return output.source_type in TYPES and TYPES[output.source_type].repacks_to(output.type)


def seconds_per_byte(
    plan: Plan, threads: int, predict: Callable[[Plan, int], dict[str, float]] | None = None
) -> dict[str, float]:
    """Type name -> seconds on that many threads for a byte of the output. predict: see `predict_seconds`, which is the default;
    what it counts for no type is done before."""
    totals: dict[str, int] = {}
    for kind, n in plan.outputs.counts():
        totals[kind.type.name] = totals.get(kind.type.name, 0) + kind.nbytes * n
    seconds = (predict or predict_seconds)(plan, threads)
    return {name: seconds.get(name, nbytes / COPY_SPEED) / max(1, nbytes) for name, nbytes in totals.items()}


def predict_seconds(plan: Plan, threads: int, without: Mapping[str, int] = MappingProxyType({})) -> dict[str, float]:
    """Seconds by type name on that many threads, with 'copy' for what is copied or repacked.

    Reading from a slow disk is not included. without: weights by type name that are timed elsewhere.
    """
    elements: dict[str, int] = {}
    copied_bytes = 0
    for kind, n in plan.outputs.counts():
        if is_copied(kind):
            copied_bytes += kind.nbytes * n
        else:
            elements[kind.type.name] = elements.get(kind.type.name, 0) + kind.n_elements * n
    rest = {name: n - without.get(name, 0) for name, n in elements.items()}
    seconds = {name: n / encode_speed(TYPES[name], threads) + n * REST / threads for name, n in rest.items() if n}
    if copied_bytes:
        seconds["copy"] = copied_bytes / COPY_SPEED
    return seconds
