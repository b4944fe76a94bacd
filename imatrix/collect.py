"""Computing an importance matrix: the calibration text runs through the model, and every linear tensor's inputs are squared
and summed, per expert for the expert stacks.

Sums are float64 and run in one order, whatever the number of threads: a run that was interrupted and goes on from its saved
state ends in the same bytes as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats import MillError, PlanError, dims
from ..runtime import Model
from ..runtime.evaluate.perplexity import OnChunk, Perplexity, context_notes, score_windows, summary
from ..runtime.evaluate.score_statistics import Moments, Tally
from ..runtime.graph import Observer, Op, Weight
from ..runtime.graph.ops import ExpertLinear, LatentAttention, Linear
from .calibration import Calibration, Stretch, cut
from .checkpoint import State
from .entries import EMBEDDINGS, Imatrix
from .sum_squares import TILE, sum_runs, sum_squares

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
        if self.output and self.embeddings and model.graph.output == model.graph.embedding:
            raise PlanError(
                f"{model.source.path}: its embeddings serve as output matrix too, and token_embd.weight can only have data for "
                "one of both uses: leave out --process-embedding (or --process-output)"
            )


@dataclass
class _Squares:
    """Sums of squares that several weights share. input: the values that the activations are; names: the weights so far."""

    input: tuple[int, ...]
    names: set[str]
    sums: np.ndarray


class Collector(Observer):
    """Sums up the squares of what linear weights multiply. `weight`: how many times the tokens count that come next."""

    wants_squares = True

    def __init__(self, model: Model, extent: Extent | None = None):
        self._model, self._extent = model, extent or Extent()
        self._extent.check(model)
        self.weight = 1
        self.used = np.zeros(model.n_embeddings if self._extent.embeddings else 0, np.int64)
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        self._last = _Squares((), set(), np.empty(0))

    def wants_input(self, op: Op) -> bool:
        """Of the layers' linear weights, and of the output matrix where the extent says so."""
        if not isinstance(op, Linear | ExpertLinear | LatentAttention):
            return False
        return op.weights[0].name.startswith("blk.") or self._extent.output

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        """Raises MillError for NaN or infinity, as do the others."""
        shared = (op.x.index,) if isinstance(op, Linear) else ()
        squares = self._shared(shared, weight, lambda: self.squares(x[:, None])[0])
        self._add(weight, matrix, squares, len(x))

    def on_expert_inputs(
        self,
        op: Op,
        weight: Weight,
        x: np.ndarray,
        matrices: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray | None,
    ) -> None:
        shared = (op.x.index, op.routing.index) if isinstance(op, ExpertLinear) else ()
        squares = self._shared(shared, weight, lambda: self._squares_of_runs(x, starts, counts, rows))
        self._add(weight, matrices, squares, counts)

    def on_head_inputs(self, op: Op, weight: Weight, x: np.ndarray) -> None:
        self.on_head_squares(op, weight, self.squares(x), len(x))

    def on_head_squares(self, op: Op, weight: Weight, squares: np.ndarray, n: int) -> None:
        _check_finite(weight.name, squares)
        if len(weight.shape) == 2:  # one matrix that all heads share
            self._add(weight, 0, squares.sum(axis=0), n * len(squares))
        else:
            self._add(weight, slice(None), squares, n)

    def _shared(self, values: tuple[int, ...], weight: Weight, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Sums of squares, computed once for the weights that take the same values one right after the other."""
        last = self._last
        if not values or last.input != values or weight.name in last.names:  # it comes again in the next pass
            squares = compute()
            _check_finite(weight.name, squares)
            self._last = last = _Squares(values, set(), squares)
        last.names.add(weight.name)
        return last.sums

    def _add(self, weight: Weight, matrices: int | slice | np.ndarray, squares: np.ndarray, n: int | np.ndarray) -> None:
        """Adds sums of squares of n activations to some of a weight's matrices."""
        if weight.name not in self.sums:
            count = dims(weight.shape)[2]
            self.counts[weight.name], self.sums[weight.name] = np.zeros(count, np.int64), np.zeros((count, weight.shape[0]))
        self.sums[weight.name][matrices] += squares if self.weight == 1 else self.weight * squares
        self.counts[weight.name][matrices] += n * self.weight

    def squares(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, heads, columns], of which columns lie together -> sums of the squares, float64 [heads, columns]."""
        (n, heads, columns), (row_step, head_step, _) = x.shape, x.strides
        address, workers = x.__array_interface__["data"][0], self._model.workers
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

    def _squares_of_runs(self, x: np.ndarray, starts: np.ndarray, counts: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Sums of the squares of runs of rows of x, or of x[rows]: float64 [runs, columns]."""
        offsets = (np.arange(len(x)) if rows is None else rows) * x.strides[0]
        squares, address, workers = np.empty((len(starts), x.shape[1])), x.ctypes.data, self._model.workers
        step = max(1, -(-len(starts) // (_PARTS * workers.count)))

        def some_runs(low: int) -> None:
            part = slice(low, low + step)
            sum_runs(address, offsets, starts[part], counts[part], squares[part])

        workers.map(some_runs, range(0, len(starts), step))
        return squares

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
        sums = np.zeros(self._model.graph.n_embd)
        for at in range(0, len(ids), _ROWS):
            some = ids[at : at + _ROWS]
            squares = np.square(self._model.embeddings(some), dtype=np.float64)
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
    with model.observing(collector):
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
    made = collector.imatrix(job.datasets, job.counted(total), job.n_ctx)
    return made, summary(tally, about | {"window_losses": tally.window_losses})


def _passes(frequency: int, before: int, done: int) -> bool:
    """Whether a multiple of the frequency lies in (before, done]."""
    return frequency > 0 and done // frequency > before // frequency
