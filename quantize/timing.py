"""How long a plan would take on this machine, extrapolated from a short run of each encoder that it uses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from ..formats import TYPES, TensorType
from ..jobs.outputs import Output, OutputKind
from ..jobs.plan import Plan
from .encode import decode, encode

SAMPLE = 1 << 16  # weights per call of an encoder
_SPREAD = 0.02  # standard deviation of weights
_FP8 = {"f8_e4m3": (448.0, 3, -6), "f8_e5m2": (57344.0, 2, -14)}  # largest number, bits behind the point, least exponent
_FP8_COLUMNS = 128  # that share a scale: how long a search takes depends on it, too
REST = 0.9e-9  # seconds of a thread for reading, decoding, checking and writing a weight (fp8, bf16 to q8_0; Zen 5)
SECONDS = 0.1  # duration of the measurement of one type
COPY_SPEED = 2e9  # bytes per second of tensors that are copied or repacked: a guess, since the disk decides


def encode_speed(
    tensor_type: TensorType,
    threads: int = 1,
    clock: Callable[[], float] = time.thread_time,
    *,
    source_type: str = "f32",
    is_weighted: bool = True,
) -> float:
    """Weights per second that `threads` threads together encode to this type, on a machine that does nothing else: random
    rows, rounded to what the source stores, with importance if errors are weighted.

    Searches end when nothing gets better any more, so that their time depends on both: q6_K of fp8 takes three times what it
    takes of bf16, and most types a multiple with importance. The first call, which may compile kernels, is not timed. clock:
    seconds of the thread's own, as time.thread_time.
    """
    columns = max(512, tensor_type.block)
    rows = max(tensor_type.rows, SAMPLE // columns // tensor_type.rows * tensor_type.rows)
    rng = np.random.default_rng(0)
    x = as_stored(rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(_SPREAD), source_type)
    has_importance = is_weighted and not tensor_type.is_float
    importance = (rng.chisquare(2, columns) + 0.01).astype(np.float32) if has_importance else None
    encode(x[: tensor_type.rows], tensor_type.name, importance)

    def work(_: int) -> float:
        calls, started = 0, clock()
        while calls == 0 or clock() - started < SECONDS:
            encode(x, tensor_type.name, importance)
            calls += 1
        return calls * x.size / max(clock() - started, 1e-9)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def as_stored(x: np.ndarray, source_type: str) -> np.ndarray:
    """float32 [rows, columns] rounded to what a source of this type stores, where that has few values; else as it is."""
    for name in source_type.split("+"):
        if name in _FP8:
            largest, bits, least = _FP8[name]
            groups = x.reshape(-1, _FP8_COLUMNS)
            scale = np.abs(groups).max(1, keepdims=True) / np.float32(largest)
            codes = groups / scale
            steps = np.ldexp(np.float32(1), np.maximum(np.frexp(codes)[1] - 1, least) - bits)
            return (np.round(codes / steps) * steps * scale).reshape(x.shape)
        if name in TYPES and not TYPES[name].is_float and TYPES.plain(TYPES[name]).fits(x.shape[1]):
            plain = TYPES.plain(TYPES[name]).name
            return decode(encode(x, plain), plain, x.shape[1])
    return x


def is_weighted(plan: Plan) -> bool:
    """Whether importance, or covariances, weigh the errors of what a plan encodes."""
    return any(f"quantize.{data}.file" in plan.metadata for data in ("imatrix", "covariance"))


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


def predict_seconds(
    plan: Plan, threads: int, without: Mapping[tuple[str, str], int] = MappingProxyType({})
) -> dict[str, float]:
    """Seconds by type name on that many threads, with 'copy' for what is copied or repacked.

    Reading from a slow disk is not included. without: weights by type name and source type that are timed elsewhere.
    """
    left, copied_bytes, weighted = Counter[tuple[str, str]](), 0, is_weighted(plan)
    for kind, n in plan.outputs.counts():
        if is_copied(kind):
            copied_bytes += kind.nbytes * n
        else:
            left[kind.type.name, kind.source_type] += kind.n_elements * n
    left.subtract(without)
    seconds = dict[str, float]()
    for (name, source_type), n in left.items():
        if n > 0:
            speed = encode_speed(TYPES[name], threads, source_type=source_type, is_weighted=weighted)
            seconds[name] = seconds.get(name, 0.0) + n / speed + n * REST / threads
    if copied_bytes:
        seconds["copy"] = copied_bytes / COPY_SPEED
    return seconds
