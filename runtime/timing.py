"""How long a model takes to read a text on this machine, extrapolated from short products of random weights of its types.

Weights are unpacked, or decoded, once for all tokens of a pass that are multiplied with them: a type is timed with few tokens
and with many, and others are on the line through both, for the columns and rows of each matrix, since those of small models
take a multiple for the same products. Attention is timed in the shapes of its heads. Of what is neither the numbers are counted
that ops make. Products and attention are timed on all threads of the model, as long as most calls take rather than the best,
since other programs take caches and memory from a job, too. A thread that another program keeps from running has the others of
its call wait, some calls for twenty times as long as they take: how much that makes is an average over all that is timed, since
what is timed of one product has such a call or has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import ceil, prod
from mmap import PAGESIZE
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..formats import TYPES, SourceTensor, TensorSource
from ..operating_system.memory import cached_pages, free_bytes, may_be_asked_for
from ..simd.workers import Workers
from .backends.cpu.attention import AttentionParams
from .backends.cpu.flash import Segment, attend
from .backends.cpu.kernels.attention.shared_values import SharedValues
from .backends.cpu.kv_cache import CacheRows
from .backends.cpu.weights import WeightMatrix, WeightStore, multiplies_as_stored
from .evaluate.divergence import BLOCK_BYTES, LogitsBlock, prepare_logits, score_chunk
from .graph import ops
from .loading import decoded_bytes
from .micro_batches import PIECE

if TYPE_CHECKING:
    from .graph import Weight
    from .model import Model

_ROWS = 2048  # of the matrix that is measured, at most
_ATTENDED = 512  # tokens of a window whose attention is measured, at most
_LANES = 16  # numbers to whose multiples rows of keys and values are filled up
_TOUCHED, _TOUCHES = 16 << 20, 2  # bytes of a tensor that are touched in a row, and how often
_ASKED = 256  # tensors of which is asked what is in memory
_FRESH = 64 << 20  # bytes that are taken from the system and go back to it
_NUMBERS = 1 << 21  # whose product takes a pass over memory
_FEW, _MANY = 16, 256  # tokens that are multiplied with it
_READ = 1 << 18  # weights that are read to see how long that takes
_SCORED_ROWS, _SCORED_TOKENS = 8, 1 << 15  # predictions that are scored, of so many tokens
_REPEATS, _AT_LEAST = 3, 0.02  # calls that are timed, and seconds of them together, at the least

_read_speeds: dict[tuple[object, ...], float] = {}  # what was measured: seconds of a weight
# Seconds of calls of all threads, and what they took if each took as long as the middle one.
_timed: list[tuple[float, float]] = []


class ProductSpeed(NamedTuple):
    """Seconds of a thread: for a weight that is unpacked or decoded, and for its product with one token."""

    weight: float
    product: float

    def seconds(self, weights: float, products: float) -> float:
        """weights: that are unpacked; products: of a weight and a token."""
        return weights * self.weight + products * self.product


class Product(NamedTuple):
    """weight: the tensor whose matrices tokens are multiplied with; matrices: all of them; used: with how many of them a token
    is; is_of_heads: these are cut into heads, for which latent attention decodes it."""

    weight: Weight
    matrices: int
    used: int
    is_of_heads: bool = False

    @property
    def size(self) -> int:
        """Weights of a matrix."""
        columns, rows, *_ = self.weight.shape
        return columns * rows

    @property
    def per_token(self) -> int:
        """Multiplications of a token."""
        return self.size * self.used


def products(some: Sequence[ops.Op]) -> Iterator[Product]:
    """The matrices that ops multiply tokens with. Rows of tables are looked up, which takes no products."""
    for op in some:
        if not isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention | ops.GroupedLinear):
            continue
        is_latent = isinstance(op, ops.LatentAttention)
        for weight in op.weights if is_latent else op.weights[:1]:
            matrices = prod(weight.shape[2:])
            yield Product(weight, matrices, op.routing.shape[0] if isinstance(op, ops.ExpertLinear) else matrices, is_latent)


def layers_seconds(model: Model, tokens: int, n_ctx: int, *, is_observed: bool = False) -> float:
    """Seconds of all threads together for running so many tokens through the layers, in windows of n_ctx. is_observed: sums of
    the squares of all inputs are wanted."""
    together = max(n_ctx, model.settings.batch // n_ctx * n_ctx) if n_ctx <= PIECE else PIECE
    passes = ceil(tokens / together)
    made = sum(prod(value.shape) for op in model.graph.ops for value in op.outputs)
    attention = attention_seconds(model, n_ctx, is_observed)
    windows, (first, again) = max(1, min(together, tokens) // n_ctx), _first_writes()
    memory = (model.windows_bytes(windows, n_ctx) or 0) * (first + (passes - 1) * again)
    seconds = _products_seconds(model, list(products(model.graph.ops)), tokens, passes)
    return seconds + tokens * (attention + made * _making()) + memory


def head_seconds(model: Model, tokens: float, against: Model | None = None) -> float:
    """Seconds of a thread for the predictions of so many tokens, and their scores. against: a baseline, whose predictions are
    made, too, and compared with."""
    blocks = ceil(tokens / max(1, BLOCK_BYTES // (4 * model.n_vocab)))
    both = [model] if against is None else [model, against]
    made = sum(_products_seconds(each, list(products(each.graph.head)), tokens, blocks) for each in both)
    return made + tokens * model.n_vocab * _scoring(against is not None)


def generation_seconds(model: Model, tokens: int) -> float:
    """Seconds of a thread for so many tokens that are generated one by one."""
    every = [*products(model.graph.ops), *products(model.graph.head)]
    return _products_seconds(model, every, tokens, tokens)


def attention_seconds(model: Model, n_ctx: int, is_observed: bool = False) -> float:
    """Of queries with keys and their weights with values, of a token on average in windows of n_ctx. Observed latents are
    weighted beside the values."""
    seconds = 0.0
    for op in model.graph.ops:
        if isinstance(op, ops.Attention | ops.LatentAttention):
            (heads, width), v_width = op.q.shape, op.out.shape[1]
            latent = op.latent.shape[0] if isinstance(op, ops.LatentAttention) and is_observed else 0
            if isinstance(op, ops.LatentAttention) and model.settings.mla == 1:  # queries and values are as wide as latents
                width, v_width, latent = op.latent.shape[0] + op.k_pe.shape[0], op.latent.shape[0], 0
            window = op.window if isinstance(op, ops.Attention) and op.window else n_ctx
            pair = _pair_seconds(width, v_width, latent, min(n_ctx, _ATTENDED), model.workers.count)
            seconds += heads * min(window, n_ctx / 2) * pair
    return seconds * waiting()


def _products_seconds(model: Model, every: Sequence[Product], tokens: float, passes: int) -> float:
    """Of so many tokens in so many passes, and of reading weights: those that no file has as they are multiplied, and pages of
    those that a file has."""
    settings, seconds, unread, mapped = model.settings, 0.0, dict[str, SourceTensor](), dict[str, SourceTensor]()
    threads = model.workers.count
    for one in every:
        tensor = model.source.tensors.get(one.weight.name)
        name = "f32"
        if tensor is not None and tensor.stored is not None and multiplies_as_stored(tensor, settings.exact):
            name = tensor.stored.name
        if tensor is not None and (tensor.mapped is None or name == "f32" != tensor.source_type):
            unread[tensor.name] = tensor
        elif tensor is not None:
            mapped[tensor.name] = tensor
        columns, rows, *_ = one.weight.shape
        fast = bool(settings.fast)
        if one.is_of_heads and settings.mla and not TYPES[name].is_float:
            name, fast = "bf16", True
        speed = product_speed(name, columns, min(rows, _ROWS), settings.exact, fast, threads)
        touched = min(one.matrices * passes, tokens * one.used)
        seconds += speed.seconds(one.size * touched, one.per_token * tokens)
    seconds *= waiting()
    seconds += _touching(list(mapped.values()))
    return seconds + _read_seconds(model.source.identity, list(unread.values()), _cache_bytes(model), passes, settings.exact)


def _cache_bytes(model: Model) -> int:
    """What decoded weights, and those that had to be read, may take."""
    asked = model.settings.cache_bytes
    return decoded_bytes(free_bytes()) if asked is None else asked


def _read_seconds(source: str, tensors: Sequence[SourceTensor], kept: int, passes: int, exact: bool) -> float:
    """Of a thread, for making what is multiplied of these tensors: once as far as that fits into so many bytes, else in every
    pass. source: its identity."""
    seconds, needed = 0.0, 0
    for tensor in tensors:
        stored = tensor.stored if multiplies_as_stored(tensor, exact) else None
        needed += 4 * tensor.n_elements if stored is None else stored.nbytes(tensor.shape)
        key = source, tensor.source_type, stored is None, tensor.shape[0]
        if key not in _read_speeds:
            read = tensor.read if stored is None or tensor.raw is None else tensor.raw
            _read_speeds[key] = _read_speed(tensor, read)
        seconds += _read_speeds[key] * tensor.n_elements
    share = min(1.0, kept / max(1, needed))
    return seconds * (share + (1 - share) * passes)


def _read_speed(tensor: SourceTensor, read: Callable[[int, int], object]) -> float:
    group = tensor.stored.rows if tensor.stored is not None else 1
    rows = min(tensor.shape[1], max(group, _READ // tensor.shape[0] // group * group))
    return _seconds(lambda: read(0, rows)) / (rows * tensor.shape[0])


def _touching(tensors: Sequence[SourceTensor]) -> float:
    """Of a thread, for touching mapped tensors for the first time: for their pages that are not in memory, which a run of each
    of some tensors shows, as long as the two runs that miss most take. Pages that are in memory take a hundredth of that."""
    random, seen, runs = np.random.default_rng(), 0, list[tuple[int, np.ndarray]]()
    for i in random.permutation(len(tensors))[:_ASKED].tolist():
        mapped = tensors[i].mapped
        flat = np.empty(0, np.uint8) if mapped is None else mapped.reshape(-1)
        first = int(random.integers(max(1, flat.size - _TOUCHED + 1)))
        run = flat[first : first + _TOUCHED]
        asked = all(map(may_be_asked_for, tensors[i].files))
        pages = cached_pages(run.ctypes.data, run.nbytes) if asked else bytes(-(-run.nbytes // PAGESIZE))
        runs.append((pages.count(0), run))
        seen += len(pages)
    missing = sum(count for count, _ in runs)
    touched = sorted(runs, key=lambda one: -one[0])[:_TOUCHES]
    if (found := sum(count for count, _ in touched)) * PAGESIZE < _TOUCHED:
        return 0.0  # of smaller runs most would be what the system reads ahead
    begun = time.thread_time()
    for _, run in touched:
        run[::PAGESIZE].max(initial=0)
    nbytes = sum(tensor.mapped.nbytes for tensor in tensors if tensor.mapped is not None)
    return (time.thread_time() - begun) / found * missing / seen * nbytes / PAGESIZE


@cache
def _workers(threads: int) -> Workers:
    return Workers(threads)


@cache
def product_speed(
    type_name: str, columns: int, rows: int, exact: bool = False, fast: bool = False, threads: int = 1
) -> ProductSpeed:
    """How fast so many threads multiply matrices of a type, measured now. rows: of the matrix, filled up to whole groups."""
    kind, numbers = TYPES[type_name], np.random.default_rng(0).integers(20, 60, 1 << 20, np.uint8)  # small floats, as any type
    rows = -(-rows // kind.rows) * kind.rows
    stored, x = np.resize(numbers, (rows, kind.row_bytes(columns))), np.ones((_MANY, columns), np.float32)
    tensor = SourceTensor("", (columns, rows), type_name, lambda *_: x[:0], lambda *_: stored, kind, stored)
    source = TensorSource("", {}, {"": tensor}, "")
    workers = _workers(threads)
    matrix = WeightMatrix(WeightStore(source, 0, exact=exact, workers=workers, fast=fast), tensor)
    few, many = (seconds_of_threads(lambda n=n: matrix.multiply(x[:n], use_gemv=False), workers) for n in (_FEW, _MANY))
    product = max(0.0, many - few) / (_MANY - _FEW)
    return ProductSpeed(max(0.0, few - product * _FEW) / tensor.n_elements, product / tensor.n_elements)


@cache
def _pair_seconds(width: int, v_width: int, latent: int, n: int, threads: int) -> float:
    """Of so many threads together, for a query and a key that it sees, of one head, in windows of n tokens, measured now.
    latent: columns of the values of all heads that are weighted, too."""
    heads, (filled, v_filled) = 2 * threads, (-(-each // _LANES) * _LANES for each in (width, v_width))
    q, out = np.full((n, heads, width), 0.01, np.float32), np.empty((n, heads, v_width), np.float32)
    keys, values = (CacheRows.of(np.zeros((heads, n, columns), np.float32)) for columns in (filled, v_filled))
    segment, params = Segment(q, keys, values, 0, out), AttentionParams(1.0)
    if latent:
        shared = SharedValues(np.zeros((n, latent), np.float32), False)
        segment = Segment(q, keys, values, 0, out, shared, np.empty((heads, latent)))
    workers = _workers(threads)
    return seconds_of_threads(lambda: attend([segment], heads, params, workers), workers) / (heads * n * n / 2)


@cache
def _first_writes() -> tuple[float, float]:
    """Of a thread, for a byte of memory that the system gives and takes back, the first time and from then on: it clears the
    pages, which a virtual machine may have to ask for at first, and the system to bring together. Measured once, since there is
    one first time."""

    def write() -> float:
        begun = time.thread_time()
        np.empty(_FRESH, np.uint8)[::PAGESIZE] = 1
        return (time.thread_time() - begun) / _FRESH

    return write(), float(np.median([write() for _ in range(3)]))


@cache
def _making() -> float:
    """Of a thread, for a number that an op makes of two."""
    x = np.ones(_NUMBERS, np.float32)

    def make() -> None:
        y = np.exp(x)
        y *= x

    return _seconds(make) / x.size


@cache
def _scoring(is_compared: bool) -> float:
    """Of a thread, for a logit; is_compared: with a baseline's."""
    logits, targets = np.zeros((_SCORED_ROWS, _SCORED_TOKENS), np.float32), np.zeros(_SCORED_ROWS, np.int64)
    rows = slice(0, _SCORED_ROWS)

    def compare() -> None:
        LogitsBlock(logits.copy(), targets).compare(rows, prepare_logits(logits, targets), targets)

    return _seconds(compare if is_compared else lambda: score_chunk(logits, targets)) / logits.size


def _seconds(call: Callable[[], object]) -> float:
    """Of this thread, for a call on average; the first one, which may compile kernels, does not count."""
    return float(np.mean(_each_call(call, time.thread_time)))


def seconds_of_threads(call: Callable[[], object], workers: Workers) -> float:
    """Of all threads together, for the call in the middle of as many, which none waits in for a thread that does not run."""
    calls = _each_call(call, workers.processor_seconds)
    middle = float(np.median(calls) or np.mean(calls))  # a coarse clock shows most calls as nothing
    _timed.append((sum(calls), middle * len(calls)))
    return middle


def waiting() -> float:
    """How many times as long as `seconds_of_threads` calls take on average, of all that was timed."""
    taken, least = (sum(seconds) for seconds in zip(*_timed, strict=True)) if _timed else (1.0, 1.0)
    return max(1.0, taken / least)


def _each_call(call: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Seconds of each of some calls, by a clock of the processor."""
    call()
    calls, last, end = list[float](), clock(), clock() + _AT_LEAST
    while len(calls) < _REPEATS or last < end:
        call()
        before, last = last, clock()
        calls.append(last - before)
    return calls
