"""Computing an importance matrix: the calibration text runs through the model, and every linear tensor's inputs are squared
and summed, per expert for the expert stacks.

Sums are float64 and run in one order, whatever the number of threads: a run that was interrupted and goes on from its saved
state ends in the same bytes as one that was not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..formats import MillError, PlanError, dims
from ..runtime import Model
from ..runtime.evaluate.perplexity import OnChunk, Perplexity, context_notes, score_windows, summary
from ..runtime.evaluate.score_statistics import Moments, Tally
from .calibration import Calibration, Stretch, cut
from .checkpoint import State
from .entries import EMBEDDINGS, Imatrix
from .sum_squares import TILE, sum_runs, sum_squares

_OUTPUT = "output.weight"
_WORTH_SHARING = 1 << 20  # activations: some hundred microseconds
_PARTS = 4  # per thread, of the experts of a layer: they have different numbers of tokens
_ROWS = 4096  # embeddings that are read at a time


@dataclass(frozen=True)
class Extent:
    """Which tensors are collected besides those of the layers.

    output      the output matrix; where the embeddings serve as one, the entry has their name
    embeddings  token_embd.weight: squares of the embeddings themselves, each as often as the text uses it
    """

    output: bool = False
    embeddings: bool = False

    def check(self, model: Model) -> None:
        """Raises PlanError when both would be one entry."""
        if self.output and self.embeddings and model.graph.head is model.graph.embedding:
            raise PlanError(
                f"{model.source.path}: its embeddings serve as output matrix too, and token_embd.weight can only have data for "
                "one of both uses: leave out --process-embedding (or --process-output)"
            )


@dataclass
class _Input:
    """What a thread has seen last: where it lies, whose input it was, its sums. `kept`: so that nothing else lies there."""

    where: tuple[str, int, tuple[int, ...]]
    names: set[str]
    squares: np.ndarray
    kept: np.ndarray


# Tensors of a layer that take the same input, one right after the other; a router is followed by the shared block.
_FAMILIES = (("attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a_mqa"), ("ffn_gate", "ffn_up"))
_ROUTERS = {"ffn_gate_inp.weight": "ffn_gate_shexp"}
_FAMILY = {
    f"{member}{suffix}.weight": f"{family[0]}{suffix}"
    for family in _FAMILIES
    for member in family
    for suffix in ("", "_exps", "_shexp")
} | _ROUTERS


@lru_cache(1 << 16)
def _family(name: str) -> str:
    layer, _, rest = name.removeprefix("blk.").partition(".")
    found = _FAMILY.get(rest)
    return f"{layer}.{found}" if found else ""


class Collector:
    """What a model's observer is to be. `weight`: how many times the tokens count that come next."""

    concurrent = True  # different matrices may report side by side

    def __init__(self, model: Model, extent: Extent | None = None):
        self._model, self._extent = model, extent or Extent()
        self._extent.check(model)
        self.weight = 1
        self.used = np.zeros(model.graph.embedding.rows if self._extent.embeddings else 0, np.int64)
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        self._lock, self._last = threading.Lock(), threading.local()
        self._heads = int(model.metadata.get(f"{model.source.architecture}.attention.head_count", 1))

    def __call__(self, name: str, matrix: int, x: np.ndarray) -> None:
        """Adds activations float32 [rows, n] that went into a matrix of a tensor. Raises MillError for NaN or infinity."""
        if not name.startswith("blk.") and not (self._extent.output and name in (_OUTPUT, EMBEDDINGS)):
            return
        sums = self._sums_of(name, x.shape[1])
        self._add(name, x, sums[matrix])
        self.counts[name][matrix] += len(x) * self.weight

    def _add(self, name: str, x: np.ndarray, row: np.ndarray) -> None:
        """row += weight * (the sums of the squares of x's columns), which matrices that take the same input share."""
        family, last = _family(name), getattr(self._last, "input", None)
        where = (family, x.ctypes.data, x.shape)
        if family and last is not None and last.where == where and name not in last.names:
            squares = last.squares
            last.names.add(name)
        else:
            squares = self.squares(x[:, None])[0]
            _check_finite(name, squares)
            self._last.input = _Input(where, {name}, squares, x)
        row += squares if self.weight == 1 else self.weight * squares

    def squares(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, heads, columns], of which columns lie together -> sums of the squares, float64 [heads, columns]."""
        (n, heads, columns), (row_step, head_step, _) = x.shape, x.strides
        address, workers = x.__array_interface__["data"][0], self._model.graph.store.workers
        squares, offsets = np.empty((heads, columns)), np.arange(n) * row_step
        if x.size < _WORTH_SHARING or workers.count == 1:
            sum_squares(address, offsets, head_step, squares)
        elif heads > 1:
            step = -(-heads // workers.count)

            def some_heads(low: int) -> None:
                sum_squares(address + low * head_step, offsets, head_step, squares[low : low + step])

            workers.map(some_heads, range(0, heads, step))
        else:
            parts = [(low, np.empty((1, min(TILE, columns - low)))) for low in range(0, columns, TILE)]
            workers.map(lambda part: sum_squares(address + 4 * part[0], offsets, head_step, part[1]), parts)
            np.concatenate([part for _, part in parts], axis=1, out=squares)
        return squares

    def add_runs(
        self,
        names: Sequence[str],
        x: np.ndarray,
        matrices: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        places: np.ndarray | None,
    ) -> None:
        """Adds what goes into several matrices of a stack, or of stacks that take the same input.

        x float32 [n, columns]; matrices[k] int64, none twice, takes the counts[k] rows from starts[k] on: rows of x, or of
        x[places]. Raises MillError for NaN or infinity.
        """
        offsets = (np.arange(len(x)) if places is None else places) * x.strides[0]
        squares, address, workers = np.empty((len(matrices), x.shape[1])), x.ctypes.data, self._model.graph.store.workers
        step = max(1, -(-len(matrices) // (_PARTS * workers.count)))

        def some_runs(low: int) -> None:
            part = slice(low, low + step)
            sum_runs(address, offsets, starts[part], counts[part], squares[part])

        workers.map(some_runs, range(0, len(matrices), step))
        for name in names:
            _check_finite(name, squares)
            sums = self._sums_of(name, x.shape[1])
            sums[matrices] += squares if self.weight == 1 else self.weight * squares
            self.counts[name][matrices] += counts * self.weight

    def add_heads(self, name: str, squares: np.ndarray, n: int, pooled: bool) -> None:
        """Adds the squares, float64 [heads, columns], of the inputs that n tokens gave to a matrix per head; pooled: to one
        matrix that all heads share. Raises MillError for NaN or infinity."""
        heads, columns = squares.shape
        _check_finite(name, squares)
        sums = self._sums_of(name, columns)
        sums += self.weight * (squares.sum(axis=0) if pooled else squares)
        self.counts[name] += n * self.weight * (heads if pooled else 1)

    def _sums_of(self, name: str, columns: int) -> np.ndarray:
        """float64 [matrices, columns], zeros where nothing was seen yet."""
        sums = self.sums.get(name)
        if sums is not None:
            return sums
        tensor = self._model.source.tensors.get(name)
        if tensor is not None:
            matrices = dims(tensor.shape)[2]
        else:  # of latent attention in another layout than this file's
            matrices = 1 if name.endswith("attn_kv_b.weight") else self._heads
        with self._lock:
            if name not in self.sums:
                self.counts[name] = np.zeros(matrices, np.int64)
                self.sums[name] = np.zeros((matrices, columns))
            return self.sums[name]

    def looked_up(self, tokens: np.ndarray) -> None:
        """Counts the embeddings that a group of windows uses."""
        if self._extent.embeddings:
            self.used += self.weight * np.bincount(tokens.reshape(-1), minlength=len(self.used))

    def imatrix(self, datasets: list[str], chunk_count: int, chunk_size: int) -> Imatrix:
        """The sums so far, rounded to float32, in the order of the model's tensors."""
        entries = {name: (sums.astype(np.float32), self.counts[name].copy()) for name, sums in self.sums.items()}
        if self._extent.embeddings:
            entries[EMBEDDINGS] = self._embeddings()
        return Imatrix(dict(sorted(entries.items())), datasets, chunk_count, chunk_size)

    def _embeddings(self) -> tuple[np.ndarray, np.ndarray]:
        ids = np.flatnonzero(self.used)
        sums = np.zeros(self._model.graph.embedding.columns)
        for at in range(0, len(ids), _ROWS):
            some = ids[at : at + _ROWS]
            squares = np.square(self._model.graph.embedding.lookup(some), dtype=np.float64)
            sums += np.einsum("t,tc->c", self.used[some], squares)
        return sums[None].astype(np.float32), self.used.sum(keepdims=True)

    def restore(self, state: State) -> None:
        self.sums, self.counts, self.used = state.sums, state.counts, state.used


class _NotFiniteError(MillError):
    """The input of a tensor is not finite, which is the fault of what comes before it."""


def _check_finite(name: str, squares: np.ndarray) -> None:
    if not np.isfinite(squares).all():
        raise _NotFiniteError(f"the input of {name} is not finite: the model or its file is damaged")


def _scored(model: Model, windows: np.ndarray, tally: Tally) -> Iterator[None]:
    """As `score_windows`, with what is at fault named where an observer met NaN or infinity."""
    try:
        yield from score_windows(model, windows, tally)
    except _NotFiniteError as error:
        found = (model.first_nonfinite(window) for window in windows)
        raise next(filter(None, found), error) from None


def collect(
    model: Model,
    tokens: Sequence[int] | np.ndarray | Calibration,
    *,
    dataset: str = "",
    n_ctx: int = 512,
    chunks: int | None = None,
    extent: Extent | None = None,
    save_frequency: int = 0,
    on_save: Callable[[Imatrix], None] | None = None,
    state_frequency: int = 0,
    on_state: Callable[[State], None] | None = None,
    resume: State | None = None,
    on_chunk: OnChunk | None = None,
) -> tuple[Imatrix, Perplexity]:
    """Runs tokens through the model in windows of n_ctx (or the windows of a calibration, for which dataset, n_ctx and chunks
    do not count); returns the imatrix and the text's perplexity.

    on_chunk(result so far, windows in all) is called after each window; on_save(imatrix so far) after every save_frequency
    windows, and on_state(what is needed to go on from here) after every state_frequency: both between passes only, and a pass
    takes several windows. resume: such a state of the same job. Raises PlanError for a state of another job, MillError for
    activations or predictions that are not finite.
    """
    if not isinstance(tokens, Calibration):
        tokens = cut(model, [Stretch(tokens, 1, [(dataset, 0)] if dataset else [])], n_ctx, chunks=chunks)
    job, total = tokens, len(tokens.windows)
    collector, tally, done = Collector(model, extent), Tally(), 0
    fingerprint = job.fingerprint(model, collector.used.size > 0, bool(extent and extent.output))
    if resume is not None:
        resume.check(fingerprint, total)
        collector.restore(resume)
        tally.losses, tally.window_losses, tally.seconds = (
            Moments.restored(resume.losses),
            list(resume.window_losses),
            resume.seconds,
        )
        done = resume.done
    about: dict[str, Any] = {"n_ctx": job.n_ctx, "tokens_xxh3": job.digest, "notes": context_notes(model, None, job.n_ctx)}
    model.observer = collector
    try:
        for group in job.groups(model):
            if group.stop <= done:
                continue
            collector.weight = int(job.weights[group.start])
            collector.looked_up(job.windows[group])
            for _ in _scored(model, job.windows[group], tally):
                if on_chunk is not None:
                    on_chunk(summary(tally, about), total)
            before, done = done, group.stop
            if done == total:
                break
            if on_save is not None and _passes(save_frequency, before, done):
                on_save(collector.imatrix(job.datasets, job.counted(done), job.n_ctx))
            if on_state is not None and _passes(state_frequency, before, done):
                losses, seconds = tally.losses.state, tally.seconds
                sums = (collector.sums, collector.counts, collector.used)
                on_state(State(fingerprint, done, *sums, losses, tuple(tally.window_losses), seconds))
    finally:
        model.observer = None
    made = collector.imatrix(job.datasets, job.counted(total), job.n_ctx)
    return made, summary(tally, about | {"window_losses": tally.window_losses})


def _passes(frequency: int, before: int, done: int) -> bool:
    """Whether a multiple of the frequency lies in (before, done]."""
    return frequency > 0 and done // frequency > before // frequency
