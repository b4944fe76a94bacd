"""Rows of a source tensor as bytes of the target type: by copy, by repacking, or by decoding and encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..data_classes import dataclass
from ..formats import MillError, SourceTensor, TensorScale, TensorType, dims
from ..formats.floats import all_finite
from ..repack.interleave import repacked_rows
from .coarse_rows import CoarseRowReport
from .codecs.codec import NonFiniteError
from .encode import encode
from .importance import Importance
from .plain_rows import plain_rows
from .scale_range import plain_range

if TYPE_CHECKING:
    from .covariance.coupling import CoupledRows
    from .covariance.matrix.prepared import PreparedCovariance
    from .covariance.source import Covariances, RowCoupling


class ErrorWeights(NamedTuple):
    """What weighs the errors of a tensor's rows.

    importance     float32 [matrices, columns] or None
    covariance_of  number of a matrix -> the covariance of its inputs, None if there is none; effort: see `encode`
    coupling       rows whose errors are weighed together; None: every row by itself
    """

    importance: np.ndarray | None = None
    covariance_of: Callable[[int], PreparedCovariance | None] | None = None
    effort: int = 1
    coupling: RowCoupling | None = None

    @classmethod
    def of(cls, tensor: SourceTensor, importance: Importance | None, covariances: Covariances | None) -> ErrorWeights:
        means = importance.for_tensor(tensor) if importance is not None else None
        if covariances is None:
            return cls(means)
        return cls(means, covariances.of(tensor), covariances.effort, covariances.row_coupling(tensor))


UNWEIGHTED = ErrorWeights()


def rows_within(start: int, stop: int, runs: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Rows out of consecutive runs of rows: (first row, the one after the last) -> the rows. A view where one run has all."""
    parts = [made[max(start, first) - first : min(stop, end) - first] for (first, end), made in runs.items()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(eq=False)
class RowProducer:
    """The function (start, stop) -> uint8 [stop - start, row_bytes] that makes a tensor's rows in the target type.

    It takes the cheapest lossless path: a copy if the source stores that type, a bit permutation between a type and its
    repacked form, bf16 directly where the source can give it; otherwise rows are decoded to float32 and encoded.

    scale          factors that the file stores apart from the rows: what is encoded is divided by them
    device         of torch that encodes the types it can, see `encode`
    replaced       receives (tensor name, count) of weights that are NaN or infinite and are encoded as 0; if None, such a
                   weight raises MillError, which names tensor, row and column
    warn_on_range  rows that the type cannot hold raise MillError or are warned of: see `coarse_rows`
    """

    tensor: SourceTensor
    target: TensorType
    weights: ErrorWeights = UNWEIGHTED
    scale: TensorScale | None = None
    device: str | None = None
    replaced: list[tuple[str, int]] | None = None
    warn_on_range: bool = True

    def __post_init__(self) -> None:
        tensor, target, self._copy_rows, self._copy_rounds = self.tensor, self.target, None, False
        if tensor.stored is not None and tensor.raw is not None:
            self._copy_rows = repacked_rows(tensor.raw, tensor.stored, target, tensor.shape[0])
        if target.name == "bf16" and tensor.read_bf16 is not None:
            self._copy_rows, self._copy_rounds = tensor.read_bf16, True
        self._report = CoarseRowReport.of_tensor(tensor, target.name) if self.warn_on_range else None

    def __call__(self, start: int, stop: int) -> np.ndarray:
        if self._copy_rows is not None:
            copied = self._copy_rows(start, stop)
            if self._is_held(copied):
                return copied
        coupling, rows = self.weights.coupling, dims(self.tensor.shape)[1]
        if coupling is None:
            return self._encoded(start, stop, None)
        blocks = self.blocks(start, stop)
        made = [self._encoded(*run, coupling.couple(start // rows, number)) for number, run in blocks.items()]
        return rows_within(start, stop, dict(zip(blocks.values(), made, strict=True)))

    def blocks(self, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """Number of each block of rows that is made as a whole and has some of these -> its first row, and the one after its
        last; where rows are made by themselves these rows."""
        coupling, rows = self.weights.coupling, dims(self.tensor.shape)[1]
        if coupling is None:
            return {0: (start, stop)}
        first, count = start // rows * rows, coupling.blocks.count
        spans = {number: coupling.blocks.span(number) for number in range(count)}
        runs = {number: (first + span.start, first + span.stop) for number, span in spans.items()}
        return {number: (begin, end) for number, (begin, end) in runs.items() if begin < stop and start < end}

    def _encoded(self, start: int, stop: int, coupled: CoupledRows | None) -> np.ndarray:
        """Rows of one matrix; coupled: what weighs their errors together."""
        matrix = start // dims(self.tensor.shape)[1]
        importance, covariance_of, effort, _ = self.weights
        weights = importance[matrix] if importance is not None else None
        covariance = covariance_of(matrix) if covariance_of is not None else None
        bf16 = covariance is None and self._is_bf16_for_gpu(weights is not None)
        x = self.tensor.raw(start, stop).view(np.uint16) if bf16 and self.tensor.raw else self.tensor.read(start, stop)
        factor = np.float32(1) if self.scale is None else self.scale.factors()[matrix]
        if self.scale is not None:
            x = x / factor
        report = self._report is not None and partial(self._report, start=start, factor=float(factor))
        encode_these = partial(
            encode, type=self.target.name, importance=weights, covariance=covariance, effort=effort, device=self.device,
            coupled=coupled, report=report, bf16=bf16,
        )  # fmt: skip
        try:
            return encode_these(x)
        except NonFiniteError as error:
            x = self.tensor.read(start, stop) if bf16 else x
            return encode_these(self._without_nonfinite(x, start, error), bf16=False)

    def _is_bf16_for_gpu(self, is_weighted: bool) -> bool:
        """Whether a GPU encodes rows that the source stores as bf16: it then gets these."""
        stored = self.tensor.stored
        if self.device is None or self.scale is not None or stored is None or stored.name != "bf16" or self.tensor.raw is None:
            return False
        return plain_rows(self.target, self.device).is_on_gpu(is_weighted)

    def _is_held(self, copied: np.ndarray) -> bool:
        """Whether all numbers are finite and, where they were rounded, no row is so small that this may have made it coarse."""
        if self._copy_rounds and copied.size:
            from .codecs.float_range import bf16_row_amax, extremes

            least, largest = extremes(bf16_row_amax(copied.view(np.uint16)))
            limits = plain_range(self.target.name)
            return largest < np.inf and (limits is None or least >= limits[0])
        return not self.target.is_float or all_finite(copied, self.target.name)

    def _without_nonfinite(self, x: np.ndarray, start: int, error: NonFiniteError) -> np.ndarray:
        """x with 0 in place of what is not finite, which is counted; raises MillError where that is not allowed."""
        if self.replaced is None:
            _, rows, matrices = dims(self.tensor.shape)
            matrix, row = divmod(start + error.row, rows)
            where = f"row {row}, column {error.column}" + (f" of matrix {matrix}" if matrices > 1 else "")
            raise MillError(
                f"{self.tensor.name}: the weight at {where} is {error.value}: "
                "a damaged source (--allow-nonfinite writes 0 instead)"
            ) from None
        nonfinite = ~np.isfinite(x)
        self.replaced.append((self.tensor.name, int(nonfinite.sum())))  # list.append: called from several threads
        return np.where(nonfinite, np.float32(0), x)
