"""Rows of a tower's table, and the transforms that its tensors need in addition to those of `tensor_transforms`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import numpy as np

from ...data_classes import dataclass
from ...formats import SourceTensor
from ..quantization.stored_weights import Rows, StoredWeight
from ..tensor_transforms import Transform, permute_heads, select_rows, unchanged
from ..tensor_transforms import reshaped as in_order


@dataclass(frozen=True)
class Row:
    """Tensors of a checkpoint and what they are called in the projector file.

    source    without .weight or .bias; {} is the layer, or what `numbers` counts
    name      in the file; a tensor without a suffix gets .weight
    make      (heads, shape as stored) -> parts of the name -> transform; None: one tensor, as it is
    numbers   what {} stands for: pairs of the number in the checkpoint and in the file; None: the layers
    optional  the model may do without
    bare      a tensor without a suffix keeps none
    """

    source: str
    name: str
    make: Callable[[int, tuple[int, ...]], dict[str, Transform]] | None = None
    numbers: str | None = None
    optional: bool = False
    bare: bool = False


def as_stored(name: str, weights: list[StoredWeight]) -> SourceTensor:
    """A tensor of any number of axes, in the order in which it is stored: ne shape is the stored shape reversed."""
    return _with_rows(name, weights[0].shape[::-1], weights[0], lambda start, stop: slice(start, stop))


def reshaped(shape: tuple[int, ...], order: np.ndarray | None = None) -> Transform:
    """The same numbers with another ne shape and, if `order` is given, with columns in another order first."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight, width = weights[0], shape[0]

        def read(start: int, stop: int) -> np.ndarray:
            first, last = start * width // weight.columns, -(-stop * width // weight.columns)
            rows = weight.read(slice(first, last))
            rows = rows if order is None else rows[:, order]
            flat = np.ascontiguousarray(rows).reshape(-1)
            return flat[start * width - first * weight.columns :][: (stop - start) * width].reshape(stop - start, width)

        return SourceTensor(name, shape, weight.source_type, read)

    return transform


def one_row(number: int) -> Transform:
    """A row of a matrix as a vector."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        weight, row = weights[0], slice(number, number + 1)
        return SourceTensor(name, (weight.columns,), weight.source_type, lambda start, stop: weight.read(row))

    return transform


def frames(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """A convolution over two frames [outputs, inputs, 2, height, width] -> '' and '.1', one convolution for each."""

    def frame(number: int) -> Transform:
        def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
            height = shape[3]

            def order(start: int, stop: int) -> np.ndarray:
                channel, row = np.divmod(np.arange(start, stop), height)
                return (2 * channel + number) * height + row

            return _with_rows(name, (shape[4], shape[3], shape[1], shape[0]), weights[0], order)

        return transform

    return {"": frame(0), ".1": frame(1)} if len(shape) == 5 and shape[2] == 2 else {"": as_stored}


def split_qkv(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """A matrix or vector of queries, keys and values -> one for each."""
    rows = shape[0] // 3
    return {part: select_rows(i * rows, rows) for i, part in enumerate("qkv")}


def rotated_pairs(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """Queries, keys and values in one; queries' and keys' neighbouring pairs, by turns of x and y, as halves: all x, all y."""
    rows = shape[0] // 3
    pairs = np.arange(2 * rows).reshape(2 * heads, -1, 2, 2).swapaxes(1, 2).reshape(-1)
    order = np.concatenate([pairs, np.arange(2 * rows, shape[0])])
    return {"": select_rows(0, shape[0], lambda numbers: order[numbers])}


def matrix(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """A tensor of more axes as a matrix: all but the last one are rows."""
    return {"": unchanged}


def column(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """The bias of a convolution as a matrix of rows of one element; weights as they are."""
    return {"": reshaped((1, shape[0])) if len(shape) == 1 else plain(shape)}


def _computed(size: int, function: Callable[[np.ndarray], np.ndarray]) -> Transform:
    """A function of a vector's numbers, float32."""

    def transform(name: str, weights: list[StoredWeight]) -> SourceTensor:
        moved = in_order(size)(name, weights)
        return SourceTensor(name, moved.shape, moved.source_type, lambda start, stop: function(moved.read(start, stop)))

    return transform


def one_number(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """A number without axes as a vector; the largest float32 for infinity, which as a limit means the same."""
    largest = np.finfo(np.float32).max
    return {"": _computed(1, lambda x: np.clip(x, -largest, largest))}


def softplus(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """log(1 + e^x) of a vector."""
    return {"": _computed(shape[0], lambda x: np.logaddexp(0.0, x.astype(np.float64)).astype(np.float32))}


def rotated(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """Queries or keys in the order that GGUF's llama has them in."""
    return {"": permute_heads(heads)}


def pixels_last(heads: int, shape: tuple[int, ...]) -> dict[str, Transform]:
    """A matrix over patches [outputs, height * width * 3] as a convolution [outputs, 3, height, width]."""
    if len(shape) == 1:
        return {"": unchanged}
    side = int((shape[1] // 3) ** 0.5)
    order = np.arange(shape[1]).reshape(side, side, 3).transpose(2, 0, 1).reshape(-1)
    return {"": reshaped((side, side, 3, shape[0]), order)}


def plain(shape: tuple[int, ...]) -> Transform:
    """The transform of a tensor that stays as it is."""
    return as_stored if len(shape) > 2 else unchanged


def _with_rows(name: str, shape: tuple[int, ...], weight: StoredWeight, order: Callable[[int, int], Rows]) -> SourceTensor:
    assert prod(shape[1:]) <= weight.rows

    def run(read: Callable[[Rows], np.ndarray], start: int, stop: int) -> np.ndarray:
        return read(order(start, stop))

    raw = partial(run, weight.raw) if weight.ggml_type else None
    return SourceTensor(name, shape, weight.source_type, partial(run, weight.read), raw, weight.ggml_type)
