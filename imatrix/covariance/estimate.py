"""How long a collection is expected to take, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil, prod

import numpy as np

from ...runtime import Model
from ...runtime.graph.ops import ExpertLinear, GroupedLinear, LatentAttention, Linear
from ...simd.workers import Workers
from .inputs import Input
from .products import BLOCK
from .sums import Sums

_COLUMNS = 2048  # of the block that is measured
# Multiplications of a model's run per second, as a share of those of sums (measured with AVX-512 VNNI, docs/covariance.md).
_QUANTISED, _FLOATS, _EXACT = 0.7, 0.3, 0.11
_DECODING = 150  # products in whose time a weight is decoded, which happens once for the tokens that run together
_KEEPING = 3e-9  # seconds of a thread for a byte of sums: to make it, and to fold and write it at the end
_SCORED = 0.5  # of the tokens, those whose predictions are
_FLOAT_TYPES = (None, "f32", "f16", "bf16", "bf16_r16")  # None: decoded from what no ggml type is


def expected_seconds(model: Model, inputs: Sequence[Input], tokens: int, passes: int) -> tuple[float, float]:
    """(seconds of running the text through the model in all passes, seconds of the sums): a rough estimate, from the number of
    multiplications and a block that is summed once; attention is not counted. On a machine that does nothing else.
    """
    rate = _products_per_second() * model.workers.count
    shares = (_EXACT, _EXACT) if model.settings.exact else (_QUANTISED, _FLOATS)
    per_token = sum(count / shares[is_float] for count, is_float in multiplications(model))
    head = [prod(op.weights[0].shape) for op in model.graph.head if isinstance(op, Linear)]
    batches = ceil(tokens / model.settings.batch)
    decoding = batches * _DECODING * sum(prod(weight.shape) for op in model.graph.ops for weight in op.weights)
    running = passes * (tokens * per_token + decoding) + tokens * _SCORED * sum(head) / shares[0]
    keeping = _KEEPING * sum(one.sums_bytes for one in inputs) / model.workers.count
    return running / rate, tokens * sum(_pairs(one) for one in inputs) / rate + keeping


@cache
def _products_per_second() -> float:
    """Products that one thread adds to sums per second of its own time, however busy the machine is, measured once."""
    block = np.ones((BLOCK, _COLUMNS), np.float32)
    sums, alone = Sums("", _COLUMNS), Workers(1)
    sums.add(block, 1, alone)
    times = []
    for _ in range(10):
        begun = time.thread_time()
        sums.add(block, 1, alone)
        times.append(time.thread_time() - begun)
    return BLOCK * _COLUMNS * _COLUMNS / 2 / max(min(times), 1e-6)


def multiplications(model: Model) -> Iterator[tuple[int, bool]]:
    """Multiplications of each matrix with a token, and whether its weights are floats."""
    for op in model.graph.ops:
        weights = op.weights if isinstance(op, LatentAttention) else op.weights[:1]
        if not isinstance(op, Linear | ExpertLinear | LatentAttention | GroupedLinear):
            continue
        for weight in weights:
            columns, rows, *rest = weight.shape
            matrices = op.routing.shape[0] if isinstance(op, ExpertLinear) else rest[0] if rest else 1
            tensor = model.source.tensors.get(weight.name)
            stored = tensor.stored.name if tensor is not None and tensor.stored is not None else None
            yield columns * rows * matrices, stored in _FLOAT_TYPES


def _pairs(one: Input) -> float:
    """Products that a token adds; of a stack of experts only those that it is sent to, counted as one."""
    return one.columns**2 / 2 * (1 if one.is_stack_of_experts else one.matrices)
