"""Statistics of covariances: how correlated the inputs of each matrix are. Field names are keys of the command line's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...data_classes import dataclass
from ...quantize.covariance.matrix.triangles import FoldedCovariance, row_runs, triangle_size
from ...simd.compile import kernel
from ...simd.memory import scratch
from ...simd.workers import ALONE, Workers
from .files import OUTPUT_SUFFIX, CovarianceFile, read_part


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of one input; of a stack whose matrices have inputs of their own, the means over those with tokens.

    name, tensors   the weights that are multiplied with it; the first names it
    columns         numbers of an input; matrices: those that have one of their own
    fewest, most    minimum and maximum of the tokens that a matrix saw
    mean_square     of the inputs, over columns
    effective_rank  (trace H)^2 / trace H^2: the number of directions if all had the same variance; at most `columns`
    diagonal_share  sum of the squares of the diagonal, as a share of that of all of H: 1 if no columns are correlated
    correlation     root mean square of the correlations of two different columns
    damping         what encoders add to the diagonal, as a share of its mean
    too_few         matrices that saw too few tokens for more than their diagonal to be used
    nbytes          in the file
    side            'input', or 'output': then columns are the rows of a block, matrices all blocks, and inputs gradients
    """

    name: str
    tensors: list[str]
    columns: int
    matrices: int
    fewest: int
    most: int
    mean_square: float
    effective_rank: float
    diagonal_share: float
    correlation: float
    damping: float
    too_few: int
    nbytes: int
    side: str = "input"


def statistics(
    file: CovarianceFile, workers: Workers = ALONE, on_part: Callable[[int, str], None] = lambda nbytes, name: None
) -> Iterator[InputStatistics]:
    """The statistics of every input, and of the gradients at every output, in the file's order; every part is read, and
    on_part(bytes, name) called after it. Raises FormatError for a damaged one."""
    for stored, blocks in file.entries.values():
        figures, too_few = [], 0
        for matrix in range(stored.matrices):
            covariance = read_part(file.path, stored, matrix, is_mapped=True)
            too_few += not covariance.has_enough_tokens
            if covariance.tokens:
                span = slice(0, stored.columns) if blocks is None else blocks.span(matrix % blocks.count)
                figures.append((*_figures(covariance, span.stop - span.start, workers), covariance.damping))
            on_part(stored.nbytes // stored.matrices, stored.name)
        mean = np.mean(figures, axis=0) if figures else np.zeros(5)
        yield InputStatistics(
            stored.name.removesuffix(OUTPUT_SUFFIX) if blocks is not None else stored.name,
            [name.removesuffix(OUTPUT_SUFFIX) for name in stored.tensors] if blocks is not None else list(stored.tensors),
            stored.columns,
            stored.matrices,
            int(stored.tokens.min()),
            int(stored.tokens.max()),
            *map(float, mean[:4]),
            damping=float(mean[4]),
            too_few=too_few,
            nbytes=stored.nbytes,
            side="input" if blocks is None else "output",
        )


def _figures(covariance: FoldedCovariance, columns: int, workers: Workers) -> tuple[float, float, float, float]:
    """(mean square, effective rank, share of the diagonal, root mean square of correlations) of the first columns, without what
    a block is filled up with."""
    diagonal = covariance.diagonal[:columns].astype(np.float64)
    roots, n = np.sqrt(diagonal), covariance.columns
    inverses = np.zeros(n)
    np.divide(1, roots, out=inverses[:columns], where=roots > 0)

    def sums(run: tuple[int, int]) -> tuple[float, float]:
        first, stop = run
        values = scratch("rows of a part", (triangle_size(n - first) - triangle_size(n - stop),), np.float32)
        covariance.rows(first, stop, values)
        return _sums_of_squares(values, inverses, first, min(stop, columns), columns)

    parts = workers.map(sums, [run for run in row_runs(n) if run[0] < columns], covariance.triangle.size)
    squares, correlations = np.sum(parts, axis=0) if parts else (0.0, 0.0)
    used = int((roots > 0).sum())
    if not squares:
        return 0.0, 0.0, 1.0, 0.0
    between = np.sqrt(max(correlations - used, 0.0) / max(used * (used - 1), 1))
    return float(diagonal.mean()), float(diagonal.sum() ** 2 / squares), float(np.square(diagonal).sum() / squares), between


@kernel
def _sums_of_squares(values, inverses, first, stop, columns):
    """Of the covariances and the correlations in rows first ... stop - 1 of an upper triangle, and of what mirrors them."""
    n, at, squares, correlations = len(inverses), 0, 0.0, 0.0
    for i in range(first, stop):
        for j in range(i, columns):
            value, count = np.float64(values[at + j - i]), 1.0 if i == j else 2.0
            squares += count * value * value
            value *= inverses[i] * inverses[j]
            correlations += count * value * value
        at += n - i
    return squares, correlations
