"""Turning rows of a source tensor into bytes of the target type: by copy, by repacking, or by decoding and encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..formats import MillError, SourceTensor, TensorScale, TensorType, dims
from ..formats.floats import all_finite
from ..repack.interleave import ReadRows, repacked_rows
from .codecs.codec import NonFiniteError
from .encode import encode
from .scale_range import ScaleRange

if TYPE_CHECKING:
    from .covariance.prepared import PreparedCovariance


def row_producer(
    tensor: SourceTensor,
    target: TensorType,
    importance: np.ndarray | None,
    nonfinite_counts: list[tuple[str, int]] | None = None,
    covariance_of: Callable[[int], PreparedCovariance | None] | None = None,
    effort: int = 1,
    scale: TensorScale | None = None,
    device: str | None = None,
    warn_on_range: bool = True,
) -> ReadRows:
    """The function (start, stop) -> uint8 [stop - start, row_bytes] that makes a tensor's rows in the target type.

    It takes the cheapest lossless path: a copy if the source stores that type, a bit permutation between a type and its
    repacked form, bf16 directly where the source can give it; otherwise rows are decoded to float32 and encoded.

    importance        float32 [matrices, columns] or None
    nonfinite_counts  receives (tensor name, count) of weights that are NaN or infinite and are encoded as 0; if None, such a
                      weight raises MillError, which names tensor, row and column
    covariance_of     number of a matrix -> the covariance of its inputs, None if there is none; effort: see `encode`
    device            of torch that encodes the types it can, see `encode`
    scale             factors that the file has beside the rows: what is encoded is divided by them
    warn_on_range     rows that the type's scales cannot hold raise MillError or are warned of: see `scale_range`
    """
    copy_rows = None
    if tensor.stored is not None and tensor.raw is not None:
        copy_rows = repacked_rows(tensor.raw, tensor.stored, target, tensor.shape[0])
        if copy_rows is not None and not target.is_float:
            return copy_rows
    if target.name == "bf16" and tensor.read_bf16 is not None:
        copy_rows = tensor.read_bf16
    _, rows, matrices = dims(tensor.shape)
    scale_range = ScaleRange(tensor, target, warn_on_range)

    def produce(start: int, stop: int) -> np.ndarray:
        if copy_rows is not None:
            copied = copy_rows(start, stop)
            if all_finite(copied, target.name):
                return copied
        weights = importance[start // rows] if importance is not None else None
        covariance = covariance_of(start // rows) if covariance_of is not None else None
        x = tensor.read(start, stop)
        factor = np.float32(1) if scale is None else scale.factors()[start // rows]
        if scale is not None:
            x = x / factor
        try:
            q = encode(x, target.name, weights, covariance, effort, device)
        except NonFiniteError as error:
            if nonfinite_counts is None:
                matrix, row = divmod(start + error.row, rows)
                where = f"row {row}, column {error.column}" + (f" of matrix {matrix}" if matrices > 1 else "")
                raise MillError(
                    f"{tensor.name}: the weight at {where} is {error.value}: "
                    "a damaged source (--allow-nonfinite writes 0 instead)"
                ) from None
            nonfinite = ~np.isfinite(x)
            nonfinite_counts.append((tensor.name, int(nonfinite.sum())))  # list.append: called from several threads
            x = np.where(nonfinite, np.float32(0), x)
            q = encode(x, target.name, weights, covariance, effort, device)
        return scale_range.fit(x, q, weights, start, float(factor), plain=covariance is None)

    return produce
