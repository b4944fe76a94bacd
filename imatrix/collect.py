"""Computing an importance matrix: the calibration text runs through the model, and the inputs of every linear tensor are
squared and summed, per expert for stacks of experts (as in llama.cpp's imatrix.cpp).

Sums are float64, token after token within a batch of windows, and batch after batch: their order depends neither on the number
of threads nor on micro-batches, and an interrupted run that is resumed from its saved state ends in the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from math import prod
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..formats import PlanError, dims
from ..runtime import Model
from ..runtime.draft_head import check_draft_layers, window_rows
from ..runtime.evaluate.perplexity import OnChunk, Perplexity, context_notes, summarise
from ..runtime.evaluate.score_statistics import Moments, RecordedScores, ScoreStatistics
from ..runtime.graph import ExpertInputs, Observer, Op, Weight
from ..runtime.graph.ops import ExpertLinear, GroupedLinear, LatentAttention, Linear
from ..runtime.graph.sink_attention_ops import SinkAttention
from .batch_sums import Addition, BatchSums
from .calibration import Calibration, TextSegment, cut_windows
from .collect_state import CollectState
from .covariance.collector import CovarianceCollector
from .entries import EMBEDDINGS, Imatrix
from .windows import is_due, score_observed

_EMBEDDING_ROWS = 4096  # read at a time


@dataclass(frozen=True)
class CollectOptions:
    """Which tensors are collected in addition to those of the layers, and how.

    output      the output matrix; if it is tied to the embeddings, the entry has their name
    nextn       the draft layers (multi-token prediction), run on the model's hidden states and the tokens of the text
    embeddings  token_embd.weight: the squares of the embeddings themselves, each as many times as the text uses it
    head_inputs the inputs themselves of matrices per head are asked for, as covariances need them, where a backend has sums of
                squares for less: these are rounded otherwise, so that all parts of a job have to ask for the same
    """

    output: bool = False
    embeddings: bool = False
    nextn: bool = False
    head_inputs: bool = False

    def check(self, model: Model) -> None:
        """Raises PlanError if both would be the same entry."""
        if self.nextn:
            check_draft_layers(model)
        if self.output and self.embeddings and model.graph.output == model.graph.embedding:
            raise PlanError(
                f"{model.source.path}: its embeddings serve as output matrix too, and token_embd.weight can only have data for "
                "one of the two uses: leave out --process-embedding (or --process-output)"
            )


@dataclass(frozen=True)
class BatchResult:
    """What running a batch of windows gives, to be added to the sums of a collection in the order of its batches."""

    additions: list[Addition]
    scores: RecordedScores


# (numbers of the windows of each batch) -> what each gives, in order: made elsewhere
RunBatches = Callable[[Sequence[slice]], Iterator[BatchResult]]


def entry_shapes(model: Model, options: CollectOptions) -> dict[str, tuple[int, int]]:
    """Name -> (matrices, columns) of the entries that an importance matrix of a model has."""
    collector, shapes = Collector(model, options), {}
    graphs = [model.graph, *(head.executable.graph for head in (model.draft_heads if options.nextn else []))]
    for op in filter(collector.wants_input, (op for graph in graphs for op in (*graph.ops, *graph.head))):
        for weight in _multiplied(op):
            shapes[weight.name] = dims(weight.shape)[2], weight.shape[0]
    if options.embeddings:
        shapes[EMBEDDINGS] = 1, model.graph.n_embd
    return shapes


def squared_numbers(model: Model, options: CollectOptions) -> int:
    """Numbers of a token whose squares are summed, but for those of latents that attention sums as it weights them."""
    collector, numbers, seen = Collector(model, options), 0, set[tuple[object, ...]]()
    for op in filter(collector.wants_input, (*model.graph.ops, *model.graph.head)):
        if isinstance(op, LatentAttention | SinkAttention):
            (heads, width), rank = op.q.shape, op.latent.shape[0]
            is_in_attention = isinstance(op, LatentAttention) and collector.wants_squares
            numbers += heads * (width - op.k_pe.shape[0] + (0 if is_in_attention else rank))
            numbers += rank if isinstance(op, LatentAttention) else 0
        elif isinstance(op, GroupedLinear):
            numbers += prod(op.x.shape)
        elif isinstance(op, Linear | ExpertLinear):
            used = op.routing.shape[0] if isinstance(op, ExpertLinear) else 1
            source = _source(op.weight, *(value.index for value in op.inputs))
            numbers += op.weight.shape[0] * used if source not in seen else 0  # matrices share what they multiply
            seen.add(source)
    return numbers


def _multiplied(op: Op) -> tuple[Weight, ...]:
    """The matrices of an op whose inputs are summed."""
    if isinstance(op, SinkAttention):
        return op.k_b, op.v_b
    return op.weights if isinstance(op, LatentAttention) else op.weights[:1]


class Collector(Observer):
    """Sums the squares of the inputs of linear weights.

    weight        how many times the tokens of the next pass count
    token_counts  int64 [embeddings], how many times each was looked up; empty if embeddings are not collected
    sums, counts  tensor name -> float64 [matrices, columns] and int64 [matrices]
    """

    def __init__(self, model: Model, options: CollectOptions | None = None):
        self._model, self._options = model, options or CollectOptions()
        self.wants_squares = not self._options.head_inputs
        self._options.check(model)
        self.weight = 1
        self.token_counts = np.zeros(model.n_embeddings if self._options.embeddings else 0, np.int64)
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        self._batch = BatchSums(model.workers)

    def wants_input(self, op: Op) -> bool:
        """Whether the op has linear weights of a layer or, if the options say so, the output matrix."""
        if not isinstance(op, Linear | ExpertLinear | LatentAttention | SinkAttention | GroupedLinear):
            return False
        if op.weights[0].is_of_adapter:
            return False
        return op.weights[0].name.startswith(("blk.", "per_layer_model_proj.")) or self._options.output

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        """Raises MillError for NaN or infinity, as the other methods do."""
        self._batch.add(weight, x, matrix, _source(weight, op.x.index) if isinstance(op, Linear) else ())

    def on_expert_inputs(self, op: Op, weight: Weight, inputs: ExpertInputs) -> None:
        source = _source(weight, op.x.index, op.routing.index) if isinstance(op, ExpertLinear) else ()
        self._batch.add_runs(weight, inputs, source)

    def on_head_inputs(self, op: Op, weight: Weight, x: np.ndarray) -> None:
        """As `Observer`: x is float32 [tokens, heads, columns]."""
        self._batch.add_heads(weight, x)

    def on_head_squares(self, op: Op, weight: Weight, squares: np.ndarray, n: int) -> None:
        """As `Observer`: sums of squares over n tokens, float64 [heads, columns]."""
        self._batch.add_head_squares(weight, squares, n)

    def end_batch(self) -> None:
        """Adds what the batch that has run gives to the sums and counts."""
        for addition in self._batch.take(self.weight):
            self.add(addition)

    def add(self, a: Addition) -> None:
        """Adds to the sums and counts."""
        if a.name not in self.sums:
            self.counts[a.name], self.sums[a.name] = np.zeros_like(a.counts), np.zeros_like(a.squares)
        self.sums[a.name] += a.squares if a.weight == 1 else a.weight * a.squares
        self.counts[a.name] += a.counts * a.weight

    def collect_drafts(self, window: np.ndarray, hidden: np.ndarray) -> None:
        """Runs the draft layers over a window; hidden: float32 [n, n_embd] of the model."""
        before, self._model.observer = self._model.observer, self
        try:
            for head, rows in zip(self._model.draft_heads, window_rows(self._model, window, hidden), strict=True):
                if self._options.output:
                    head.logits(rows)
        finally:
            self._model.observer = before

    def count_embeddings(self, tokens: np.ndarray) -> None:
        """Counts the embeddings that windows use; tokens: int64 of any shape."""
        if self._options.embeddings:
            self.token_counts += self.weight * np.bincount(tokens.reshape(-1), minlength=len(self.token_counts))

    def imatrix(self, datasets: list[str], chunk_count: int, chunk_size: int) -> Imatrix:
        """The importance matrix so far, with sums rounded to float32 and entries sorted by name."""
        entries = {name: (sums.astype(np.float32), self.counts[name].copy()) for name, sums in self.sums.items()}
        if self._options.embeddings:
            entries[EMBEDDINGS] = self._embedding_entry()
        return Imatrix(dict(sorted(entries.items())), datasets, chunk_count, chunk_size)

    def _embedding_entry(self) -> tuple[np.ndarray, np.ndarray]:
        used = np.flatnonzero(self.token_counts)
        sums = np.zeros(self._model.graph.n_embd)
        for start in range(0, len(used), _EMBEDDING_ROWS):
            ids = used[start : start + _EMBEDDING_ROWS]
            squares = np.square(self._model.embeddings(ids), dtype=np.float64)
            sums += np.einsum("t,tc->c", self.token_counts[ids], squares)
        return sums[None].astype(np.float32), self.token_counts.sum(keepdims=True)

    def restore(self, state: CollectState) -> None:
        """Continues from a saved state."""
        self.sums, self.counts, self.token_counts = state.sums, state.counts, state.token_counts


class _Recorder(Collector):
    """Keeps what would be added, in order."""

    def __init__(self, model: Model, options: CollectOptions, weight: int):
        super().__init__(model, options)
        self.weight, self.additions = weight, []

    def add(self, a: Addition) -> None:
        self.additions.append(a)


def _source(weight: Weight, *values: int) -> tuple[int | str, ...]:
    """What weights have in common whose inputs are the same values of the graph: these and the layer, since draft layers have
    graphs of their own."""
    return (*values, *weight.name.split(".")[:2])


def run_batch(
    model: Model,
    windows: np.ndarray,
    weight: int,
    first: int,
    options: CollectOptions,
    covariance: CovarianceCollector | None = None,
) -> BatchResult:
    """What a batch adds to the sums of `collect`, and its scores.

    windows: int64 [n, n_ctx], which run together; weight: of their tokens; first: number of the first of them, for errors;
    covariance: another observer of the same pass. Raises MillError as `collect` does.
    """
    recorder, scores = _Recorder(model, options, weight), RecordedScores()
    with model.observing(recorder), nullcontext() if covariance is None else model.observing(covariance):
        for _ in score_observed(model, windows, first, scores, recorder.collect_drafts if options.nextn else None):
            pass
    recorder.end_batch()
    return BatchResult(recorder.additions, scores)


def fingerprint_of(model: Model, calibration: Calibration, options: CollectOptions) -> str:
    """Digest of everything that a collection depends on: what a state to resume from has to have."""
    more = [name for name in ("nextn", "head_inputs") if getattr(options, name)]
    return calibration.fingerprint(model, options.embeddings, options.output, *more)


def collect(
    model: Model,
    tokens: Sequence[int] | np.ndarray | Calibration,
    *,
    dataset: str = "",
    n_ctx: int = 512,
    chunks: int | None = None,
    options: CollectOptions | None = None,
    save_frequency: int = 0,
    on_save: Callable[[Imatrix], None] | None = None,
    state_frequency: int = 0,
    on_state: Callable[[CollectState], None] | None = None,
    resume: CollectState | None = None,
    on_chunk: OnChunk | None = None,
    covariance: CovarianceCollector | None = None,
    has_final_state: bool = False,
    elsewhere: RunBatches | None = None,
) -> tuple[Imatrix, Perplexity]:
    """Runs a calibration text through a model; returns the importance matrix and the text's perplexity.

    tokens       token ids, which are cut into windows of n_ctx, or a `Calibration` (then dataset, n_ctx and chunks are unused)
    dataset      name of the text; chunks: windows at most
    on_chunk     called with (result so far, number of windows) after each window
    on_save      called with the importance matrix so far after every save_frequency windows
    on_state     called with the state after every state_frequency windows
    resume       a state of the same job
    covariance   another observer of the same passes, which is given the weights of tokens
    has_final_state  whether on_state is called after the last window too
    elsewhere    runs the batches, instead of this model: what `run_batch` gives for each, which is added up in order

    on_save and on_state are called between passes only, and a pass has several windows. Raises PlanError for a state of another
    job, MillError for activations or predictions that are not finite.
    """
    if not isinstance(tokens, Calibration):
        tokens = cut_windows(model, [TextSegment(tokens, 1, [(dataset, 0)] if dataset else [])], n_ctx, chunks=chunks)
    calibration, total = tokens, len(tokens.windows)
    collector, statistics, done = Collector(model, options), ScoreStatistics(), 0
    chosen = options or CollectOptions()
    fingerprint = fingerprint_of(model, calibration, chosen)
    if resume is not None:
        resume.check(fingerprint, total)
        collector.restore(resume)
        statistics.losses = Moments.restored(resume.losses)
        statistics.window_losses, statistics.seconds = list(resume.window_losses), resume.seconds
        done = resume.done
    n_ctx, datasets = calibration.n_ctx, calibration.datasets
    fields: dict[str, Any] = {"n_ctx": n_ctx, "tokens_xxh3": calibration.digest, "notes": context_notes(model, None, n_ctx)}
    batches = [batch for batch in calibration.batches(model) if batch.stop > done]
    results = elsewhere(batches) if elsewhere is not None else None
    with ExitStack() as stack:
        for observer in (collector, covariance) if results is None else ():
            if observer is not None:
                stack.enter_context(model.observing(observer))
        for batch in batches:
            collector.weight = int(calibration.weights[batch.start])
            if covariance is not None:
                covariance.weight = collector.weight
            collector.count_embeddings(calibration.windows[batch])
            on_hidden = collector.collect_drafts if chosen.nextn else None
            if results is not None:
                windows_done = _joined(next(results), collector, statistics)
            else:
                windows_done = score_observed(model, calibration.windows[batch], batch.start, statistics, on_hidden)
            for _ in windows_done:
                if on_chunk is not None:
                    on_chunk(summarise(statistics, fields), total)
            collector.end_batch()
            before, done = done, batch.stop
            is_last = done == total
            if is_last and not has_final_state:
                break
            if on_save is not None and not is_last and is_due(save_frequency, before, done):
                on_save(collector.imatrix(datasets, calibration.weighted_count(done), n_ctx))
            if on_state is not None and (is_last or is_due(state_frequency, before, done)):
                losses, seconds = statistics.losses.state, statistics.seconds
                sums = (collector.sums, collector.counts, collector.token_counts)
                on_state(CollectState(fingerprint, done, *sums, losses, tuple(statistics.window_losses), seconds))
    imatrix = collector.imatrix(datasets, calibration.weighted_count(total), n_ctx)
    return imatrix, summarise(statistics, fields | {"window_losses": statistics.window_losses})


def _joined(result: BatchResult, collector: Collector, statistics: ScoreStatistics) -> Iterator[None]:
    """Adds what a batch gave elsewhere; yields after each window."""
    for addition in result.additions:
        collector.add(addition)
    yield from statistics.join(result.scores)
