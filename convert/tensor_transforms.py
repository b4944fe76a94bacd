"""Source tensors out of a checkpoint's weights: as they are, stacked, with rows in another order, transposed per head.

Each function takes the GGUF name and the weights that it is made of. Nothing is read until the result's `read` or `raw` is
called, and then only the rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..formats import SourceTensor
from .quantization.stored_weights import Rows, Weight

Edit = Callable[[str, list[Weight]], SourceTensor]


def plain(name: str, weights: list[Weight]) -> SourceTensor:
    """The one weight as it is: a vector stays one, [rows, columns] becomes ne (columns, rows)."""
    weight = weights[0]
    shape = (weight.columns,) if len(weight.shape) == 1 else (weight.columns, weight.rows)
    return _by_rows(name, shape, weight, slice)


def stacked(name: str, weights: list[Weight]) -> SourceTensor:
    """Experts' matrices of one shape -> ne (columns, rows, number of experts)."""
    first = weights[0]
    rows = first.rows

    def read(start: int, stop: int) -> np.ndarray:
        matrix, at = divmod(start, rows)
        return weights[matrix].read(slice(at, at + stop - start))

    def raw(start: int, stop: int) -> np.ndarray:
        matrix, at = divmod(start, rows)
        return weights[matrix].raw(slice(at, at + stop - start))

    def narrow(start: int, stop: int) -> np.ndarray:
        matrix, at = divmod(start, rows)
        return weights[matrix].narrow(slice(at, at + stop - start))

    kinds = {w.kind for w in weights}
    kind = first.kind if len(kinds) == 1 else None
    sources = "+".join(sorted({w.source_type for w in weights}))
    narrows = all(w.narrows for w in weights)
    shape, optional = (first.columns, rows, len(weights)), (raw if kind else None, kind)
    return SourceTensor(name, shape, sources, read, *optional, read_bf16=narrow if narrows else None)


def interleaved(n_head: int) -> Edit:
    """For rotary embeddings: Hugging Face rotates a head's first half of rows against its second half, GGUF's llama
    neighbouring pairs. Row 2 i + s of a head is its row s * half + i there. Vectors (biases) alike.
    """

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]
        is_vector = len(weight.shape) == 1
        size = (weight.columns if is_vector else weight.rows) // n_head

        def order(start: int, stop: int) -> np.ndarray:
            head, at = np.divmod(np.arange(start, stop), size)
            return head * size + at % 2 * (size // 2) + at // 2

        if is_vector:
            return _vector(name, weight, order(0, weight.columns))
        return _by_rows(name, (weight.columns, weight.rows), weight, order)

    return edit


def value_part(n_head: int, key_size: int, value_size: int, *, by_head: bool) -> Edit:
    """attn_v_b out of kv_b_proj, whose heads are key_size rows and then value_size rows each: the latter.

    -> ne (columns, value_size, n_head) if by_head, else (columns, value_size * n_head).
    """

    def order(start: int, stop: int) -> np.ndarray:
        head, at = np.divmod(np.arange(start, stop), value_size)
        return head * (key_size + value_size) + key_size + at

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        columns = weights[0].columns
        shape = (columns, value_size, n_head) if by_head else (columns, value_size * n_head)
        return _by_rows(name, shape, weights[0], order)

    return edit


def key_part(n_head: int, key_size: int, value_size: int, *, by_head: bool) -> Edit:
    """attn_k_b out of kv_b_proj: each head's key_size rows, transposed, so that a row holds key_size elements.

    -> ne (key_size, columns, n_head) if by_head, else (key_size, columns * n_head). A run of rows decodes the heads it touches.
    """

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]
        rank = weight.columns

        def read(start: int, stop: int) -> np.ndarray:
            out = np.empty((stop - start, key_size), np.float32)
            for head in range(start // rank, -(-stop // rank)):
                first = head * (key_size + value_size)
                block = weight.read(slice(first, first + key_size))
                low, high = max(start, head * rank), min(stop, (head + 1) * rank)
                out[low - start : high - start] = block.T[low - head * rank : high - head * rank]
            return out

        shape = (key_size, rank, n_head) if by_head else (key_size, rank * n_head)
        return SourceTensor(name, shape, weight.source_type, read)

    return edit


def plus_one(name: str, weights: list[Weight]) -> SourceTensor:
    """A vector with 1 added: Gemma's norms multiply by 1 + weight, GGUF's by the weight."""
    weight = weights[0]
    return SourceTensor(name, (weight.columns,), weight.source_type, lambda start, stop: weight.read(slice(0, 1)) + 1)


def flattened(name: str, weights: list[Weight]) -> SourceTensor:
    """A matrix of one row as a vector."""
    weight = weights[0]
    return SourceTensor(name, (weight.columns,), weight.source_type, lambda start, stop: weight.read(slice(0, 1)))


def stack_rows(first: int = 0, step: int = 1) -> Edit:
    """Of a stack [matrices, rows, columns] every step-th row of each matrix -> ne (columns, rows / step, matrices)."""

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]
        matrices = weight.shape[0]
        rows = weight.rows // matrices
        kept = rows // step

        def order(start: int, stop: int) -> Rows:
            if step == 1:
                return slice(start, stop)
            matrix, at = np.divmod(np.arange(start, stop), kept)
            return matrix * rows + first + step * at

        return _by_rows(name, (weight.columns, kept, matrices), weight, order)

    return edit


def half_rows(number: int) -> Edit:
    """Of a stack [matrices, rows, columns] the first (0) or second (1) half of each matrix's rows."""

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]
        matrices = weight.shape[0]
        kept = weight.rows // matrices // 2

        def order(start: int, stop: int) -> Rows:
            matrix, at = divmod(start, kept)
            first = (2 * matrix + number) * kept + at
            return slice(first, first + stop - start)

        return _by_rows(name, (weight.columns, kept, matrices), weight, order)

    return edit


def run_of_rows(first: int, count: int, order: Callable[[np.ndarray], np.ndarray] | None = None) -> Edit:
    """`count` rows of a matrix from `first` on -> ne (columns, count); of a vector, these elements.

    order: numbers of rows of the result -> which of the `count` they are.
    """

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]

        def rows(start: int, stop: int) -> Rows:
            return slice(first + start, first + stop) if order is None else first + order(np.arange(start, stop))

        if len(weight.shape) == 1:
            numbers = np.arange(count)
            return _vector(name, weight, first + (numbers if order is None else order(numbers)))
        return _by_rows(name, (weight.columns, count), weight, rows)

    return edit


def stack_columns(first: int = 0, step: int = 1) -> Edit:
    """As `stack_rows`, of a stack whose matrices are stored the other way round: [matrices, columns, rows]."""

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]
        matrices = weight.shape[0]
        columns, kept = weight.rows // matrices, weight.columns // step

        def turned(take: Callable[[Rows], np.ndarray], start: int, stop: int) -> np.ndarray:
            matrix, at = divmod(start, kept)
            whole = take(slice(matrix * columns, (matrix + 1) * columns))
            return np.ascontiguousarray(whole[:, first::step][:, at : at + stop - start].T)

        def read(start: int, stop: int) -> np.ndarray:
            if weight.kind is None:
                return turned(weight.read, start, stop)
            return weight.widened(turned(weight.words, start, stop))

        def raw(start: int, stop: int) -> np.ndarray:
            return turned(weight.words, start, stop).view(np.uint8)

        shape = (columns, kept, matrices)
        return SourceTensor(name, shape, weight.source_type, read, raw if weight.kind else None, weight.kind)

    return edit


def every(first: int, step: int) -> Edit:
    """Of a matrix [rows, columns] every step-th column -> ne (columns / step, rows)."""

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        weight = weights[0]

        def read(start: int, stop: int) -> np.ndarray:
            return np.ascontiguousarray(weight.read(slice(start, stop))[:, first::step])

        return SourceTensor(name, (weight.columns // step, weight.rows), weight.source_type, read)

    return edit


def constant(make: Callable[[], np.ndarray]) -> Edit:
    """A vector float32 [n] that the checkpoint does not hold; made when the sizes have been found to be right."""

    def edit(name: str, weights: list[Weight]) -> SourceTensor:
        values = make()
        return SourceTensor(name, values.shape, "f32", lambda start, stop: values[None].copy())

    return edit


def _by_rows(name: str, shape: tuple[int, ...], weight: Weight, order: Callable[[int, int], Rows]) -> SourceTensor:
    """Rows of one weight; order(start, stop) gives the weight's rows that make up the tensor's rows start ... stop."""

    def run(take: Callable[[Rows], np.ndarray], start: int, stop: int) -> np.ndarray:
        return take(order(start, stop))

    raw = partial(run, weight.raw) if weight.kind else None
    narrow = partial(run, weight.narrow) if weight.narrows else None
    return SourceTensor(name, shape, weight.source_type, partial(run, weight.read), raw, weight.kind, read_bf16=narrow)


def _vector(name: str, weight: Weight, order: np.ndarray) -> SourceTensor:
    def read(start: int, stop: int) -> np.ndarray:
        return weight.read(slice(0, 1))[:, order]

    return SourceTensor(name, (weight.columns,), weight.source_type, read)
