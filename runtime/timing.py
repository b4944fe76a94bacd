"""How long a model takes to read a text on this machine, extrapolated from short products of random weights of its types.

Weights are unpacked, or decoded, once for all tokens of a pass that are multiplied with them: a type is timed with few tokens
and with many, and others are on the line through both, for the columns and rows of each matrix, since those of small models
take a multiple for the same products. Of what is no product the numbers are counted that ops make.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import ceil, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..formats import TYPES, SourceTensor, TensorSource
from ..operating_system.memory import free_bytes
from .backends.cpu.weights import WeightMatrix, WeightStore, multiplies_as_stored
from .evaluate.divergence import BLOCK_BYTES, LogitsBlock, prepare_logits, score_chunk
from .graph import ops
from .loading import decoded_bytes
from .micro_batches import PIECE

if TYPE_CHECKING:
    from .graph import Weight
    from .model import Model

_ROWS = 2048  # of the matrix that is measured, at most
_ATTENDED = 128  # columns of products of queries and keys
_NUMBERS = 1 << 21  # whose product takes a pass over memory
_FEW, _MANY = 16, 256  # tokens that are multiplied with it
_READ = 1 << 18  # weights that are read to see how long that takes
_SCORED_ROWS, _SCORED_TOKENS = 8, 1 << 15  # predictions that are scored, of so many tokens
_REPEATS = 3

_read_speeds: dict[tuple[object, ...], float] = {}  # what was measured: seconds of a weight


class ProductSpeed(NamedTuple):
    """Seconds of a thread: for a weight that is unpacked or decoded, and for its product with one token."""

    weight: float
    product: float

    def seconds(self, weights: float, products: float) -> float:
        """weights: that are unpacked; products: of a weight and a token."""
        return weights * self.weight + products * self.product


class Product(NamedTuple):
    """weight: the tensor whose matrices tokens are multiplied with; matrices: all of them; used: with how many of them a token
    is."""

    weight: Weight
    matrices: int
    used: int

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
        for weight in op.weights if isinstance(op, ops.LatentAttention) else op.weights[:1]:
            matrices = prod(weight.shape[2:])
            yield Product(weight, matrices, op.routing.shape[0] if isinstance(op, ops.ExpertLinear) else matrices)


def layers_seconds(model: Model, tokens: int, n_ctx: int) -> float:
    """Seconds of a thread for running so many tokens through the layers, in windows of n_ctx; on a machine that does nothing
    else."""
    together = max(n_ctx, model.settings.batch // n_ctx * n_ctx) if n_ctx <= PIECE else PIECE
    passes = ceil(tokens / together)
    made = sum(prod(value.shape) for op in model.graph.ops for value in op.outputs)
    attention = attention_products(model, n_ctx) * product_speed("f32", _ATTENDED, _ROWS).product
    return _products_seconds(model, list(products(model.graph.ops)), tokens, passes) + tokens * (attention + made * _making())


def head_seconds(model: Model, tokens: float, against: Model | None = None) -> float:
    """Seconds of a thread for the predictions of so many tokens, and their scores. against: a baseline, whose predictions are
    made, too, and compared with."""
    blocks = ceil(tokens / max(1, BLOCK_BYTES // (4 * model.n_vocab)))
    both = [model] if against is None else [model, against]
    made = sum(_products_seconds(each, list(products(each.graph.head)), tokens, blocks) for each in both)
    return made + tokens * model.n_vocab * _scoring(against is not None)


def attention_products(model: Model, n_ctx: int) -> float:
    """Multiplications of queries with keys and of their weights with values, of a token on average in windows of n_ctx."""
    count = 0.0
    for op in model.graph.ops:
        if isinstance(op, ops.Attention | ops.LatentAttention):
            (heads, width), v_width = op.q.shape, op.out.shape[1]
            window = op.window if isinstance(op, ops.Attention) and op.window else n_ctx
            count += heads * (width + v_width) * min(window, n_ctx / 2)
    return count


def _products_seconds(model: Model, every: Sequence[Product], tokens: float, passes: int) -> float:
    """Of so many tokens in so many passes, and of reading weights that no file has as they are multiplied."""
    settings, seconds, unread = model.settings, 0.0, dict[str, SourceTensor]()
    for one in every:
        tensor = model.source.tensors.get(one.weight.name)
        name = "f32"
        if tensor is not None and tensor.stored is not None and multiplies_as_stored(tensor, settings.exact):
            name = tensor.stored.name
        if tensor is not None and (tensor.mapped is None or name == "f32" != tensor.source_type):
            unread[tensor.name] = tensor
        columns, rows, *_ = one.weight.shape
        speed = product_speed(name, columns, min(rows, _ROWS), settings.exact, bool(settings.round_bf16))
        touched = min(one.matrices * passes, tokens * one.used)
        seconds += speed.seconds(one.size * touched, one.per_token * tokens)
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


@cache
def product_speed(type_name: str, columns: int, rows: int, exact: bool = False, round_bf16: bool = False) -> ProductSpeed:
    """How fast matrices of a type are multiplied, measured now. rows: of the matrix, filled up to whole groups."""
    kind, numbers = TYPES[type_name], np.random.default_rng(0).integers(20, 60, 1 << 20, np.uint8)  # small floats, as any type
    rows = -(-rows // kind.rows) * kind.rows
    stored, x = np.resize(numbers, (rows, kind.row_bytes(columns))), np.ones((_MANY, columns), np.float32)
    tensor = SourceTensor("", (columns, rows), type_name, lambda *_: x[:0], lambda *_: stored, kind, stored)
    matrix = WeightMatrix(WeightStore(TensorSource("", {}, {"": tensor}, ""), 0, exact=exact, round_bf16=round_bf16), tensor)
    few, many = (_seconds(lambda n=n: matrix.multiply(x[:n], use_gemv=False)) for n in (_FEW, _MANY))
    product = max(0.0, many - few) / (_MANY - _FEW)
    return ProductSpeed(max(0.0, few - product * _FEW) / tensor.n_elements, product / tensor.n_elements)


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
    """The least of a few, of this thread; the first call, which may compile kernels, does not count."""
    call()
    times = []
    for _ in range(_REPEATS):
        begun = time.thread_time()
        call()
        times.append(time.thread_time() - begun)
    return min(times)
