"""Computing an importance matrix: the calibration text runs through the model, and every linear tensor's inputs are squared
and summed, per expert for the expert stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..formats import MillError, dims
from ..runtime import Model
from ..runtime.perplexity import OnChunk, Perplexity, perplexity
from .entries import Imatrix


class Collector:
    """Sums in float64: a long run adds small squares to large sums."""

    def __init__(self, model: Model, *, process_output: bool = False):
        self._shapes = {name: tensor.shape for name, tensor in model.source.tensors.items()}
        self._process_output = process_output
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}

    def observe(self, name: str, matrix: int, x: np.ndarray) -> None:
        """Adds activations float32 [rows, n] that went into a matrix of a tensor. Raises MillError for NaN or infinity."""
        if not name.startswith("blk.") and not (self._process_output and name == "output.weight"):
            return
        if name not in self._sums:
            columns, _, matrices = dims(self._shapes[name])
            self._sums[name] = np.zeros((matrices, columns))
            self._counts[name] = np.zeros(matrices, np.int64)
        squares = np.einsum("rn,rn->n", x, x)
        if not np.isfinite(squares).all():
            raise MillError(f"the input of {name} is not finite: the model or its file is damaged")
        self._sums[name][matrix] += squares
        self._counts[name][matrix] += len(x)

    def imatrix(self, datasets: list[str], chunk_count: int, chunk_size: int) -> Imatrix:
        entries = {name: (sums.astype(np.float32), self._counts[name].copy()) for name, sums in self._sums.items()}
        return Imatrix(entries, datasets, chunk_count, chunk_size)


def collect(
    model: Model,
    tokens: Sequence[int],
    *,
    dataset: str = "",
    n_ctx: int = 512,
    chunks: int | None = None,
    process_output: bool = False,
    save_frequency: int = 0,
    on_save: Callable[[Imatrix], None] | None = None,
    on_chunk: OnChunk | None = None,
) -> tuple[Imatrix, Perplexity]:
    """Runs the tokens through the model in windows of n_ctx; returns the imatrix and the text's perplexity.

    on_chunk(result so far, windows in all) is called after each window; on_save(imatrix so far) every save_frequency windows.
    """
    collector = Collector(model, process_output=process_output)
    names = [dataset] if dataset else []

    def after(so_far: Perplexity, total: int) -> None:
        done = so_far.chunks
        if on_save is not None and save_frequency and done % save_frequency == 0 and done < total:
            on_save(collector.imatrix(names, done, n_ctx))
        if on_chunk is not None:
            on_chunk(so_far, total)

    model.observer = collector.observe
    try:
        result = perplexity(model, tokens, n_ctx=n_ctx, chunks=chunks, on_chunk=after)
    finally:
        model.observer = None
    return collector.imatrix(names, result.chunks, n_ctx), result
