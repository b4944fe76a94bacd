"""Cutting a plan into pieces for workers: whole rows of large tensors, several small tensors together."""

from __future__ import annotations

from collections.abc import Iterator

from ...data_classes import dataclass
from ...jobs.execute import Pending, row_chunks

MIN_WEIGHTS, MAX_WEIGHTS = 1 << 20, 1 << 28  # of a piece
PIECES_PER_THREAD = 8  # of a whole job, if pieces do not become too small: the slowest worker is waited for at the end


@dataclass(frozen=True)
class Span:
    """Rows start ... stop - 1 of a tensor: one or several consecutive chunks of `jobs.execute.row_chunks`."""

    tensor: str
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class Cut:
    """Consecutive spans, in the order of the output."""

    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def __str__(self) -> str:
        first, last = self.spans[0].tensor, self.spans[-1].tensor
        return first if first == last else f"{first} to {last}"


def piece_weights(pending: Pending, threads: int) -> int:
    """Weights of a piece: so many that each thread gets several of a job, within bounds."""
    total = sum(output.n_elements for output, _ in pending)
    return min(MAX_WEIGHTS, max(MIN_WEIGHTS, total // (PIECES_PER_THREAD * max(1, threads))))


def cut(pending: Pending, weights: int, max_bytes: int | None = None) -> Iterator[Cut]:
    """The tensors as pieces of about so many weights, and of at most max_bytes encoded bytes if a single chunk permits that.

    Pieces are cut where the executor of one machine cuts its chunks, and consist of such chunks: the bytes are the same.
    """
    spans: list[Span] = []
    size = nbytes = 0
    for output, _ in pending:
        columns, row_bytes = output.shape[0], output.type.row_bytes(output.shape[0])
        for start, stop in row_chunks(output):
            chunk = (stop - start) * row_bytes
            if spans and (size >= weights or (max_bytes is not None and nbytes + chunk > max_bytes)):
                yield Cut(tuple(spans))
                spans, size, nbytes = [], 0, 0
            if spans and spans[-1].tensor == output.name:
                last = spans.pop()
                spans.append(Span(output.name, last.start, stop, last.nbytes + chunk))
            else:
                spans.append(Span(output.name, start, stop, chunk))
            size, nbytes = size + (stop - start) * columns, nbytes + chunk
    if spans:
        yield Cut(tuple(spans))
