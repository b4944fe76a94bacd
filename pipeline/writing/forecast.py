"""What carrying out a plan takes: disk space, and time on this machine."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from itertools import pairwise

from ...formats import TensorSource, dims
from ...jobs import direct_io
from ...jobs.execute import CHUNK_ELEMENTS, CHUNKS_PER_THREAD, goes_past_the_cache
from ...jobs.outputs import OutputKind
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.timing import is_copied
from ...simd.compile.compile_time import compilation_seconds
from ..common.forecast import Forecast, free_space, interpreting
from ..common.vocabulary_check import tokenizer_file

# Anonymous memory of a job, measured with 1 to 16 threads: that of the program with its kernels, for each token of a vocabulary
# as it stands in the file, and for each weight of a chunk of rows that a thread encodes, or makes a float. The allocator keeps
# what threads free: they come to have a multiple of what the encoder of one chunk takes.
_STARTED, _TOKEN, _ENCODED, _DECODED = 43 << 20, 150, 18, 12
_COPIES = 9  # of the bytes of a chunk that is not encoded
# The same before tensors are read: while a checkpoint's vocabulary is, and while it is compared with its tokenizer.json.
_TOKEN_READ, _TOKEN_CHECKED = 440, 950
# The same of seconds of the processor, where `interpreting` is 1: until the first tensor is read, with each token of a
# vocabulary read, and compared.
_STARTING, _TOKEN_STARTING, _TOKEN_COMPARED, _STORED_STARTING = 1.0, 4e-6, 8.5e-6, 1e-6
_HASHED = 4 << 20  # bytes that are hashed to see how long it takes
_COMPARED = 8e-9  # seconds of a thread for a weight that is read back, decoded and compared (Zen 5)
_PREPARING = 12 << 20  # of a program that prepares covariances
_APART, _APART_MOST = 16, 30 << 20  # bytes of a weight that is encoded with a covariance, and of a thread for these
_TOGETHER = 24  # bytes of a weight whose row is encoded together with others
_TIMED_BYTES = 1 << 30  # of a job whose types are timed first, which takes a tenth of a second each, with covariances some


Timing = Callable[[Plan, int], dict[str, float]]  # a plan, on so many threads -> seconds by type of tensor


def forecast(
    plan: Plan,
    source: TensorSource,
    disk_needed: int | None = None,
    *,
    timing: Timing | None = None,
    threads: int | None = None,
    has_manifest: bool = False,
    verifies: bool = False,
    left: Plan | None = None,
) -> Forecast:
    """What carrying out a plan of a source takes.

    disk_needed: bytes, if the job takes others than the plan's. timing: predicts the seconds, on so many threads (None: all
    processors). has_manifest: sha256 of tensors and of files are taken while they are written. verifies: samples are compared
    with the source afterwards. left: what is to be written, if parts of the plan are there (they are compared, too).
    """
    threads = threads or available_cpus()
    tokens = plan.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, Sized) else 0
    is_compared = tokenizer_file(source) is not None
    is_read = any(path.name == "config.json" for path in source.files)  # of a checkpoint's files; a GGUF's stays as it is
    before = (_TOKEN_CHECKED if is_compared else _TOKEN_READ if is_read else 0) * count
    of_each = _TOKEN_STARTING if is_read else _STORED_STARTING
    starting = _STARTING + count * (of_each + (_TOKEN_COMPARED if is_compared else 0))
    seconds, idle = None, 0.0
    if timing is not None:
        begun = time.process_time() - compilation_seconds()
        parts = timing(left or plan, threads)
        taken = max(0.0, time.process_time() - compilation_seconds() - begun) if is_timed_first(plan) else 0.0
        seconds = {"start": (interpreting() * starting + taken) / threads, **parts}
        if has_manifest:
            seconds["checksums"] = 2 * plan.total_bytes * hashing_seconds() / threads
        if verifies:
            seconds["verify"] = verifying_seconds(plan, parts if left is None else timing(plan, threads), threads)
            idle = (threads - 1) * seconds["verify"]
    memory = _STARTED + max(
        before,
        _TOKEN * count
        + threads * _thread_bytes(plan)
        + plan.covariance_bytes
        + (_PREPARING if plan.covariance_bytes else 0)
        + (direct_io.MEMORY if goes_past_the_cache((left or plan).total_bytes) else 0),
    )
    needed, free = plan.file_bytes if disk_needed is None else disk_needed, free_space(plan.files[0].path.parent)
    return Forecast(needed, free, seconds, memory=memory, threads=threads, idle=idle)


def verifying_seconds(plan: Plan, parts: Mapping[str, float], threads: int) -> float:
    """Of one thread, to compare samples of what a plan wrote with its source (quantize/verify.py), which is encoded again for
    that. parts: seconds in which so many threads encode all of it, by type. All covariances are counted, though of a stack of
    experts with one for each only RUNS_PER_TENSOR are prepared again."""
    from ...quantize.covariance.timing import PREPARING
    from ...quantize.verify import sampled_weights

    (compared, sampled), whole = sampled_weights(plan), Counter[str]()
    for kind, count in plan.outputs.counts():
        whole[kind.type.name] += 0 if is_copied(kind) else count * kind.n_elements
    encoding = sum(parts.get(name, 0.0) * count / whole[name] for name, count in sampled.items())
    return compared * _COMPARED + threads * (encoding + (parts.get(PREPARING, 0.0) if sampled else 0.0))


def is_timed_first(plan: Plan) -> bool:
    """Whether a job times its types before it writes, to tell the time that is left: one that is over soon does not, nor one of
    a single type."""
    types = {kind.type.name for kind in plan.outputs.kinds if not kind.type.is_float}
    return len(types) > 1 and plan.total_bytes >= _TIMED_BYTES


def hashing_seconds() -> float:
    """Of a thread, for a byte."""
    data = bytes(_HASHED)
    begun = time.thread_time()
    hashlib.sha256(data)
    return (time.thread_time() - begun) / len(data)


def _thread_bytes(plan: Plan) -> int:
    """What a thread takes for rows: a chunk that is encoded, and others that wait to be written; runs of rows that are encoded
    together are larger."""
    usual = max((_chunk_bytes(kind) for kind, _ in plan.outputs.counts()), default=0)
    if not plan.covariance_bytes:
        return round(usual)
    matrices = (dims(kind.shape) for kind, _ in plan.outputs.counts())
    usual = max(usual, min(_APART_MOST, _APART * max((columns * rows for columns, rows, _ in matrices), default=0)))
    ends = ((output, [*output.cuts, output.shape[1]]) for output in plan.outputs if output.cuts)
    runs = ((stop - start) * output.shape[0] for output, cuts in ends for start, stop in pairwise(cuts))
    return max(round(usual), _TOGETHER * max(runs, default=0))


def _chunk_bytes(kind: OutputKind) -> float:
    """Of one thread, for chunks of an output."""
    columns, rows, _ = dims(kind.shape)
    stored = kind.nbytes / kind.n_elements
    made = (_DECODED if kind.type.is_float else _ENCODED) + CHUNKS_PER_THREAD * stored
    return min(CHUNK_ELEMENTS, columns * rows) * (_COPIES * stored if is_copied(kind) else made)
