"""Transforms from a checkpoint's weights to GGUF tensors: unchanged, stacked, with rows in another order, transposed per head.

A transform takes the GGUF name and the weights that the tensor is made of, and returns a `SourceTensor`. Nothing is read until
its `read` or `raw` is called, and then only the rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from threading import Lock

import numpy as np

from ..data_classes import dataclass
from ..formats import TYPES, SourceTensor, TensorScale
from .quantization.stored_weights import Rows, StoredWeight

Transform = Callable[[str, list[StoredWeight]], SourceTensor]
_ROWS_AT_ONCE = 1024  # of a matrix that is read as a whole
RowOrder = Callable[[int, int], Rows]  # (start, stop): rows of the result -> the weight's rows that they are


@dataclass(frozen=True)
class Changed:
    """A transform that changes numbers, and does not only move them; called as any other.

    transform  as it is applied
    move       the same without changing numbers: where each comes from
    back       (values of the result, float32 [rows, columns], its first row) -> those that `move` has there
    ones       numbers of the weights that `move` does not read: with ones in them it is undone
    """

    transform: Transform
    move: Transform
    back: Callable[[np.ndarray, int], np.ndarray]
    ones: tuple[int, ...] = ()

    def __call__(self, name: str, weights: list[StoredWeight]) -> SourceTensor:
        return self.transform(name, weights)


def _numbers_of(
    shape: Callable[[StoredWeight], tuple[int, ...]], read: Callable[[StoredWeight, int, int], np.ndarray]
) -> Transform:
    """Numbers made of one weight. shape: the ne shape of the result; read: (weight, start, stop) -> these rows of it."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        return SourceTensor(name, shape(weights[0]), weights[0].source_type, partial(read, weights[0]))

    return transform


def _own_shape(weight: StoredWeight) -> tuple[int, ...]:
    return (weight.columns,) if len(weight.shape) == 1 else (weight.columns, weight.rows)


def unchanged(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """One weight as it is: a vector stays one, a matrix [rows, columns] has ne shape (columns, rows)."""
    return reordered(name, _own_shape(weights[0]), weights[0], slice)


def as_int32(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """A matrix of whole numbers as int32, which `read` gives as float32."""
    weight = weights[0]

    def raw(start: int, stop: int) -> np.ndarray:
        return weight.words(slice(start, stop)).astype(np.int32).view(np.uint8)

    shape = (weight.columns, weight.rows)
    return SourceTensor(name, shape, "i32", lambda start, stop: weight.read(slice(start, stop)), raw, TYPES["i32"])


def joined_scale(scales: list[TensorScale | None]) -> TensorScale | None:
    """The factors of a stack of matrices from those of the matrices, of which all have one, or none."""
    present = [scale for scale in scales if scale is not None]
    inputs = [scale.inputs for scale in present if scale.inputs is not None]

    def joined(parts: list[Callable[[], np.ndarray]]) -> Callable[[], np.ndarray]:
        return lambda: np.concatenate([part() for part in parts])

    if len(present) < len(scales):
        return None
    return TensorScale(joined([scale.factors for scale in present]), joined(inputs) if len(inputs) == len(scales) else None)


def permute_heads(n_heads: int, rotated: int | None = None) -> Transform:
    """Rows in the order that GGUF's llama needs for rotary embeddings (`permute` in convert_hf_to_gguf.py).

    Hugging Face rotates row i of a head's first half with row i of its second half, llama.cpp neighbouring rows: row 2 i + s of
    a head is row s * half + i of the checkpoint. Elements of vectors (biases) likewise. rotated: only so many rows at the
    end of each head are (latent attention); None: all.
    """

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]
        is_vector = len(weight.shape) == 1
        head_dim = (weight.columns if is_vector else weight.rows) // n_heads

        def order(start: int, stop: int) -> np.ndarray:
            return interleave_halves(np.arange(start, stop), head_dim, rotated)

        if is_vector:
            return _selected_elements(name, weight, order(0, weight.columns))
        return reordered(name, (weight.columns, weight.rows), weight, order)

    return transform


def interleave_halves(rows: np.ndarray, head_dim: int, rotated: int | None = None) -> np.ndarray:
    """Row numbers with interleaved halves of each head, or of its last `rotated` rows, -> the numbers of these rows in the
    checkpoint; int64 of any shape."""
    n = head_dim if rotated is None else rotated
    row = rows % head_dim - (head_dim - n)
    return np.where(row < 0, rows, rows - row + row % 2 * (n // 2) + row // 2)


def kv_b_values(n_heads: int, key_size: int, value_size: int, *, by_head: bool) -> Transform:
    """attn_v_b from kv_b_proj, whose heads are key_size rows followed by value_size rows each: the latter.

    -> ne shape (columns, value_size, n_heads) if by_head, else (columns, value_size * n_heads).
    """

    def order(start: int, stop: int) -> np.ndarray:
        head, row = np.divmod(np.arange(start, stop), value_size)
        return head * (key_size + value_size) + key_size + row

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        columns = weights[0].columns
        shape = (columns, value_size, n_heads) if by_head else (columns, value_size * n_heads)
        return reordered(name, shape, weights[0], order)

    return transform


def kv_b_keys(n_heads: int, key_size: int, value_size: int, *, by_head: bool) -> Transform:
    """attn_k_b from kv_b_proj: each head's key_size rows, transposed, so that a row has key_size elements.

    -> ne shape (key_size, columns, n_heads) if by_head, else (key_size, columns * n_heads). Reading a run of rows decodes the
    heads that it touches.
    """

    def read(weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        rank, parts = weight.columns, []
        for head in range(start // rank, -(-stop // rank)):
            first_row = head * (key_size + value_size)
            keys = weight.read(slice(first_row, first_row + key_size))
            low, high = max(start, head * rank), min(stop, (head + 1) * rank)
            parts.append(keys.T[low - head * rank : high - head * rank])
        return np.concatenate(parts)

    def shape(weight: StoredWeight) -> tuple[int, ...]:
        return (key_size, weight.columns, n_heads) if by_head else (key_size, weight.columns * n_heads)

    return _numbers_of(shape, read)


_plus_one = _numbers_of(lambda weight: (weight.columns,), lambda weight, start, stop: weight.read(slice(0, 1)) + 1)
# A vector plus 1: Gemma's norms multiply by 1 + weight, GGUF's by the weight.
add_one = Changed(_plus_one, unchanged, lambda values, first: values - 1)


def negated_exponential(order: np.ndarray) -> Transform:
    """A vector x as -e^x, with its elements in an order: GGUF's ssm_a of a checkpoint's A_log."""
    return _exponential(reordered_vector(order))


def _exponential(move: Transform, sign: int = -1) -> Transform:
    """A transform, and then sign * e^x of each number x."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        moved = move(name, weights)
        return SourceTensor(name, moved.shape, moved.source_type, lambda start, stop: sign * np.exp(moved.read(start, stop)))

    return Changed(transform, move, lambda values, first: np.log(sign * values.astype(np.float64)).astype(np.float32))


def reordered_vector(order: np.ndarray) -> Transform:
    """A vector with its elements in an order."""
    return lambda name, weights: _selected_elements(name, weights[0], order)


# A matrix of one row as a vector.
flatten = _numbers_of(lambda weight: (weight.columns,), lambda weight, start, stop: weight.read(slice(0, 1)))


def reshaped(*shape: int, exponential: int = 0) -> Transform:
    """All numbers of a small weight, in order, in another ne shape. exponential: 1 or -1: x becomes this times e^x."""

    def read(weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        return weight.read(slice(0, weight.rows)).reshape(-1, shape[0])[start:stop]

    transform = _numbers_of(lambda weight: shape, read)
    return _exponential(transform, exponential) if exponential else transform


def scaled(factors: float | np.ndarray) -> Transform:
    """A matrix or vector times a number, or times a number for each row of the matrix, float32 [rows]."""

    def read(weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        values = weight.read(slice(start, stop))
        return values * (factors[start:stop, None] if isinstance(factors, np.ndarray) else np.float32(factors))

    def back(values: np.ndarray, first: int) -> np.ndarray:
        if isinstance(factors, np.ndarray):
            return values / factors[first : first + len(values), None]
        return values / np.float32(factors)

    return Changed(_numbers_of(_own_shape, read), unchanged, back)


def _product(name: str, weights: list[StoredWeight]) -> SourceTensor:
    def read(start: int, stop: int) -> np.ndarray:
        return weights[0].read(slice(0, 1)) * weights[1].read(slice(0, 1))

    return SourceTensor(name, (weights[0].columns,), weights[0].source_type, read)


# Two vectors, perhaps as matrices of one row, multiplied element by element.
product = Changed(_product, lambda name, weights: flatten(name, weights[1:]), lambda values, first: values, ones=(0,))


def unit_columns(epsilon: float) -> Transform:
    """A matrix whose columns are divided by their lengths plus epsilon. The first read reads the whole matrix for these."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight, lock = weights[0], Lock()
        lengths: list[np.ndarray] = []

        def read(start: int, stop: int) -> np.ndarray:
            with lock:
                if not lengths:
                    squares = np.zeros(weight.columns)
                    for first in range(0, weight.rows, _ROWS_AT_ONCE):
                        rows = weight.read(slice(first, min(first + _ROWS_AT_ONCE, weight.rows)))
                        squares += np.square(rows, dtype=np.float64).sum(0)
                    lengths.append((np.sqrt(squares) + epsilon).astype(np.float32))
            return weight.read(slice(start, stop)) / lengths[0]

        return SourceTensor(name, (weight.columns, weight.rows), weight.source_type, read)

    return Changed(transform, unchanged, as_divided)


def as_divided(values: np.ndarray, first: int) -> np.ndarray:
    """`Changed.back` of a division by lengths, which are not in a GGUF: rows or columns of length 1 are divided by that again,
    so that they stay what they are but for rounding."""
    return values


def padded_rows(count: int) -> Transform:
    """A matrix with at most `count` rows; after its own, copies of its first one fill it up to `count`."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]

        def order(start: int, stop: int) -> Rows:
            rows = np.arange(start, stop)
            return slice(start, stop) if stop <= weight.rows else np.where(rows < weight.rows, rows, 0)

        return reordered(name, (weight.columns, count), weight, order)

    return transform


def select_rows(first: int, count: int, order: Callable[[np.ndarray], np.ndarray] | None = None) -> Transform:
    """`count` rows of a matrix from `first` on -> ne shape (columns, count); of a vector, these elements.

    order: row numbers of the result -> which of the `count` rows they are.
    """

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]

        def rows(start: int, stop: int) -> Rows:
            return slice(first + start, first + stop) if order is None else first + order(np.arange(start, stop))

        if len(weight.shape) == 1:
            numbers = np.arange(count)
            return _selected_elements(name, weight, first + (numbers if order is None else order(numbers)))
        return reordered(name, (weight.columns, count), weight, rows)

    return transform


def transposed(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """A matrix that is stored transposed, [columns, rows] -> ne shape (columns, rows)."""
    return transposed_matrices(lambda rows: slice(0, rows))(name, weights)


def stack_rows(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """Vectors [columns] of one length -> ne shape (columns, vectors)."""

    def read(start: int, stop: int) -> np.ndarray:
        return np.concatenate([weight.read(slice(0, 1)) for weight in weights[start:stop]])

    return SourceTensor(name, (weights[0].columns, len(weights)), weights[0].source_type, read)


def joined_rows(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """Matrices [rows, columns], each of its own number of rows, one below the other -> ne shape (columns, all rows)."""
    ends = np.cumsum([weight.rows for weight in weights])

    def read(start: int, stop: int) -> np.ndarray:
        parts = []
        for number in range(int(np.searchsorted(ends, start, "right")), len(weights)):
            first = int(ends[number]) - weights[number].rows
            if first >= stop:
                break
            parts.append(weights[number].read(slice(max(start - first, 0), min(stop - first, weights[number].rows))))
        return np.concatenate(parts)

    source_type = "+".join(sorted({weight.source_type for weight in weights}))
    return SourceTensor(name, (weights[0].columns, int(ends[-1])), source_type, read)


def transposed_matrices(select: Callable[[int], slice], split: int = 0) -> Transform:
    """select: number of rows of a matrix -> those that are taken; split: experts of a stack that is stored as one matrix."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight = weights[0]
        is_stack = split > 0 or len(weight.shape) > 2
        experts = split or (weight.shape[0] if len(weight.shape) > 2 else 1)
        columns, selected = weight.rows // experts, select(weight.columns)
        n_selected = len(range(weight.columns)[selected])

        stored_floats = weight.ggml_type is not None and weight.ggml_type.is_float

        def transposed(read_rows: Callable[[Rows], np.ndarray], start: int, stop: int) -> np.ndarray:
            expert, row = divmod(start, n_selected)
            matrix = read_rows(slice(expert * columns, (expert + 1) * columns))
            return np.ascontiguousarray(matrix[:, selected][:, row : row + stop - start].T)

        def read(start: int, stop: int) -> np.ndarray:
            if not stored_floats:
                return transposed(weight.read, start, stop)
            return weight.to_float32(transposed(weight.words, start, stop))

        def raw(start: int, stop: int) -> np.ndarray:
            return transposed(weight.words, start, stop).view(np.uint8)

        shape = (columns, n_selected, experts) if is_stack else (columns, n_selected)
        if not stored_floats:  # blocks lie along the other axis
            return SourceTensor(name, shape, weight.source_type, read)
        return SourceTensor(name, shape, weight.source_type, read, raw, weight.ggml_type)

    return transform


def select_columns(first: int, step: int) -> Transform:
    """From a matrix [rows, columns] every step-th column -> ne shape (columns / step, rows)."""

    def read(weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(weight.read(slice(start, stop))[:, first::step])

    return _numbers_of(lambda weight: (weight.columns // step, weight.rows), read)


def reorder_columns(order: np.ndarray) -> Transform:
    """A matrix [rows, columns] whose columns are those of the checkpoint's in another order."""

    def read(weight: StoredWeight, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(weight.read(slice(start, stop))[:, order])

    return _numbers_of(lambda weight: (weight.columns, weight.rows), read)


def computed(compute: Callable[[], np.ndarray]) -> Transform:
    """A vector or matrix of float32 that the checkpoint does not contain; computed when all sizes have been checked."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        values = compute()
        rows = values.reshape(-1, values.shape[-1])
        return SourceTensor(name, values.shape[::-1], "f32", lambda start, stop: rows[start:stop].copy())

    return transform


def reordered(name: str, shape: tuple[int, ...], weight: StoredWeight, order: RowOrder) -> SourceTensor:
    """A tensor whose rows are rows of one weight, in some order."""

    def run(read_rows: Callable[[Rows], np.ndarray], start: int, stop: int) -> np.ndarray:
        return read_rows(order(start, stop))

    raw = partial(run, weight.raw) if weight.ggml_type else None
    read_bf16 = partial(run, weight.read_bf16) if weight.has_read_bf16 else None
    scale = joined_scale([weight.scale] * prod(shape[2:])) if len(shape) > 1 else None
    read = partial(run, weight.read)
    return SourceTensor(name, shape, weight.source_type, read, raw, weight.ggml_type, read_bf16=read_bf16, scale=scale)


def _selected_elements(name: str, weight: StoredWeight, elements: np.ndarray) -> SourceTensor:
    """A vector of some elements of a vector."""
    return SourceTensor(name, (len(elements),), weight.source_type, lambda start, stop: weight.read(slice(0, 1))[:, elements])
