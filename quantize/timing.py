"""How long a plan would take on this machine, extrapolated from short runs of what it does: rows of its tensors are read and
encoded as the job does it. Where rows are not here (a repository that is read remotely, headers alone), encoders are timed on
random ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from types import MappingProxyType

import numpy as np

from ..formats import TYPES, TensorType, dims
from ..jobs.execute import row_chunks
from ..jobs.outputs import Output, OutputKind
from ..jobs.plan import Plan
from .encode import decode, encode
from .row_producer import ErrorWeights
from .tensor_outputs import TensorRows

SAMPLE = 1 << 16  # weights per call of an encoder
_SPREAD = 0.02  # standard deviation of weights
_FP8 = {"f8_e4m3": (448.0, 3, -6), "f8_e5m2": (57344.0, 2, -14)}  # largest number, bits behind the point, least exponent
_FP8_COLUMNS = 128  # that share a scale: how long a search takes depends on it, too
REST = 0.9e-9  # seconds of a thread for reading, decoding, checking and writing a weight (fp8, bf16 to q8_0; Zen 5)
SECONDS = 0.1  # duration of the measurement of one type
_LONGEST = 4 * SECONDS  # of the clock, where a disk is waited for
_RUNS = 64  # of rows that are timed
COPY_SPEED = 2e9  # bytes per second of tensors that are copied or repacked: a guess, since the disk decides
WRITING = 0.3e-9  # seconds of a thread for the checksum of a byte and for writing it


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
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_sample_rows(tensor_type, columns), columns)).astype(np.float32) * np.float32(_SPREAD)
    x = as_stored(x, source_type)
    importance = _random_importance(columns) if is_weighted and not tensor_type.is_float else None
    encode(x[: tensor_type.rows], tensor_type.name, importance)

    def work(_: int) -> float:
        calls, started = 0, clock()
        while calls == 0 or clock() - started < SECONDS:
            encode(x, tensor_type.name, importance)
            calls += 1
        return calls * x.size / max(clock() - started, 1e-9)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def _sample_rows(tensor_type: TensorType, columns: int) -> int:
    return max(tensor_type.rows, SAMPLE // columns // tensor_type.rows * tensor_type.rows)


def _random_importance(columns: int) -> np.ndarray:
    return (np.random.default_rng(0).chisquare(2, columns) + 0.01).astype(np.float32)


def seconds_of_a_weight(
    output: Output, threads: int = 1, *, lacks_importance: bool = False, weights: int = 1 << 62
) -> float | None:
    """Seconds of a thread for reading and encoding, or copying, a weight of an output, while so many threads are at it: in the
    runs of rows that the job has, in shorter ones of what takes long. None where its rows are not here, or are all zeros.

    lacks_importance: its errors are weighed, by what is not read here. weights: no more are encoded by a thread.
    """
    if not isinstance(output.produce, TensorRows) or not all(path.exists() for path in output.produce.tensor.files):
        return None
    produce = output.produce.alone
    columns, matrix_rows, matrices = dims(output.shape)
    if lacks_importance and not output.type.is_float:
        importance = np.broadcast_to(_random_importance(columns), (matrices, columns))
        produce = replace(produce, weights=ErrorWeights(importance))
    rows, runs = min(_sample_rows(output.type, columns), matrix_rows), list(islice(row_chunks(output), _RUNS))
    if not runs or not produce.tensor.read(0, rows).any():
        return None
    produce(0, rows)  # which compiles the kernels
    begun = time.thread_time()
    produce(0, rows)
    if (time.thread_time() - begun) * (runs[0][1] - runs[0][0]) > SECONDS * rows:
        runs = [(start, start + rows) for start, stop in runs if start + rows <= stop]

    def work(number: int) -> float:
        done, begun, until = 0, time.thread_time(), time.perf_counter() + _LONGEST
        for start, stop in islice(cycle(runs), number, None, threads):
            produce(start, stop)
            done += (stop - start) * columns
            if time.thread_time() - begun > SECONDS or time.perf_counter() > until or done >= weights:
                break
        return (time.thread_time() - begun) / done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads))) / threads


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

    Waiting for a slow disk is not included. without: weights by type name and source type that are timed elsewhere.
    """
    left, largest, seconds = Counter[tuple[str, str]](), dict[tuple[str, str], tuple[int, int]](), dict[str, float]()
    for (kind, n), first in zip(plan.outputs.counts(), plan.outputs.first_of_kinds(), strict=True):
        key = kind.type.name, kind.source_type
        left[key] += kind.n_elements * n
        largest[key] = max(largest.get(key, (0, 0)), (kind.n_elements * n, first))
    left.subtract(without)
    for (name, source_type), n in left.items():
        if n <= 0:
            continue
        output = plan.outputs[largest[name, source_type][1]]
        own = "copy" if is_copied(output) else name
        lacks_importance = is_weighted(plan) and "quantize.imatrix.file" not in plan.metadata
        each = seconds_of_a_weight(output, threads, lacks_importance=lacks_importance, weights=n)
        nbytes = n * output.nbytes / output.n_elements
        if each is not None:
            taken = (n * each + nbytes * WRITING) / threads
        elif own == "copy":
            taken = nbytes / COPY_SPEED
        else:
            speed = encode_speed(output.type, threads, source_type=source_type, is_weighted=is_weighted(plan))
            taken = n / speed + n * REST / threads
        seconds[own] = seconds.get(own, 0.0) + taken
    return seconds
