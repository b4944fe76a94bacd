"""Compares the layers and weights of two models: shows where a quantisation goes wrong and where it costs most.

Both models run the same tokens at the same time, layer by layer, so that only one layer's outputs of each are in memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import islice
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import PlanError, SourceTensor, dims
from ...jobs.patterns import NamePattern, compile_pattern
from ...simd.workers import Workers
from ..graph import Observer, Op, Weight
from ..graph.ops import ExpertLinear, GroupedLinear, LatentAttention, Linear
from ..model import Model
from ..placement.stored_sizes import stored_nbytes
from .divergence import ModelPredictions, score
from .perplexity import make_windows
from .score_statistics import ScoreStatistics

ROWS_BYTES = 16 << 20  # decoded weights of one tensor in memory
THREAD_BYTES = 50 << 20  # that a thread has of both models' weights, at the most
_WEIGHT_BYTES = 16  # of a weight of these: of both, their difference, and what one of them is decoded from
_TIMED, _TIMED_ROWS = 0.02, 64  # seconds that comparing weights is timed for, and rows that are compared
MAX_INPUTS = 64  # input vectors per matrix with which the error of its products is measured
_POLL_SECONDS = 0.2  # interval of checking whether the other model is still running


@dataclass(frozen=True)
class LayerError:
    """Error of layer outputs. relative: |b - a| / |a| over all tokens; worst: of the worst token; cosine: mean of tokens."""

    layer: int
    relative: float
    worst: float
    cosine: float


@dataclass(frozen=True)
class TensorError:
    """Error of one tensor.

    relative  |b - a| / |a| of the decoded weights
    product   |x (b - a)| / |x a| over inputs x of the matrix in model a; None if it was not measured
    nbytes_*  size in the file
    """

    name: str
    type_a: str
    type_b: str
    nbytes_a: int
    nbytes_b: int
    relative: float
    product: float | None = None


@dataclass
class Comparison:
    """Errors of model b relative to model a, which usually is the unquantised one.

    layers          one per layer, in order, up to the first with outputs that are not finite
    output          scores of the predictions: kld_mean, top1_agreement, ratio and the rest of `ScoreStatistics.comparison`
    tensors         those that both models have with the same shape
    only_a, only_b  names of tensors that only one model has
    reshaped        names of tensors with different shapes
    nonfinite       message about the first output that is not finite; '' if there is none
    """

    tokens: int = 0
    layers: list[LayerError] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorError] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    nonfinite: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields, ready for json.dumps."""
        return asdict(self)


OnTensor = Callable[[int, str], None]


def compare(
    a: Model,
    b: Model,
    tokens_or_text: str | Sequence[int] | np.ndarray | None,
    n_ctx: int = 512,
    chunks: int | None = 1,
    weights: str | NamePattern | None = "",
    products: bool = False,
    on_window: Callable[[], None] = lambda: None,
    on_tensor: OnTensor | None = None,
    threads: int | None = None,
) -> Comparison:
    """Compares the outputs of all layers on windows of a text, then the weights.

    tokens_or_text  None: layers are not compared
    n_ctx, chunks   tokens of a window and number of windows, None: all
    weights         regular expression that is searched in tensor names; '': all tensors, None: weights are not compared
    products        measure the errors of products, with inputs of the first window
    on_window       called after each window
    on_tensor       called with (bytes of a and b, name) after each tensor
    threads         that have weights at a time, each THREAD_BYTES of them; None: those of a

    Raises PlanError for models with different layers or vocabularies, for a text that is too short and for an invalid regular
    expression.
    """
    comparison = Comparison()
    inputs: dict[tuple[str, int], np.ndarray] = {}
    if tokens_or_text is not None:
        if a.n_layers != b.n_layers or a.n_vocab != b.n_vocab:
            shapes = (f"{m.n_layers} layers and {m.n_vocab} tokens" for m in (a, b))
            raise PlanError(f"the models cannot be compared: {' against '.join(shapes)}")
        _compare_layers(
            comparison, a, b, make_windows(a, tokens_or_text, n_ctx, chunks), inputs if products else None, on_window
        )
    if weights is not None and not comparison.nonfinite:
        pattern = compile_pattern(weights, "weights") if isinstance(weights, str) else weights
        workers = a.workers if threads is None else Workers(threads)
        _compare_weights(comparison, a, b, pattern, inputs, on_tensor, workers)
    return comparison


# -- layers


class _LayerSums:
    """Running sums of one layer's errors."""

    def __init__(self) -> None:
        self.error_squared = self.norm_squared = self.cosines = self.worst = 0.0
        self.n_tokens = 0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Adds the outputs of both models for the same tokens, float32 [n, n_embd]."""
        norm_a, norm_b, dot = (np.einsum("ij,ij->i", x, y, dtype=np.float64) for x, y in ((a, a), (b, b), (a, b)))
        difference = b - a
        error = np.einsum("ij,ij->i", difference, difference, dtype=np.float64)
        self.error_squared, self.norm_squared = self.error_squared + error.sum(), self.norm_squared + norm_a.sum()
        self.cosines += (dot / np.sqrt(np.maximum(norm_a * norm_b, 1e-300))).sum()
        self.worst = max(self.worst, float(np.sqrt(error / np.maximum(norm_a, 1e-300)).max()))
        self.n_tokens += len(a)

    def error(self, layer: int) -> LayerError:
        relative = float(np.sqrt(self.error_squared / self.norm_squared)) if self.norm_squared else 0.0
        return LayerError(layer, relative, self.worst, float(self.cosines / self.n_tokens))


def _compare_layers(
    comparison: Comparison,
    a: Model,
    b: Model,
    windows: np.ndarray,
    inputs: dict[tuple[str, int], np.ndarray] | None,
    on_window: Callable[[], None],
) -> None:
    """Fills tokens, layers, output and nonfinite. inputs: gets input vectors of each matrix of model a, for the products."""
    sums: dict[int, _LayerSums] = {}
    statistics, middle = ScoreStatistics(), windows.shape[1] // 2
    for number, window in enumerate(windows):
        # An observed pass may differ from an unobserved one in the last bits: so both models are observed, or none.
        observe_inputs = inputs is not None and number == 0
        observers = [_InputSampler(inputs), _InputSampler(None)] if observe_inputs else [Observer(), Observer()]
        try:
            with a.observing(observers[0]), b.observing(observers[1]):
                hidden_a, hidden_b = _run_both(a, b, window, sums)
                targets = window[middle + 1 :]
                scores = score(b, hidden_b[middle:-1], targets, ModelPredictions(a, hidden_a[middle:-1], targets))
        except _NonfiniteOutput as error:
            comparison.nonfinite = str(error.model.explain_nonfinite(window))
            break
        for losses, model in ((scores.base_losses, a), (scores.losses, b)):
            if losses is not None and not np.isfinite(losses).all():
                comparison.nonfinite = str(model.explain_nonfinite(window))
        if comparison.nonfinite:
            break
        statistics.add(scores)
        comparison.tokens += len(window)
        comparison.output = statistics.perplexity() | statistics.comparison()
        on_window()
    comparison.layers = [sums[layer].error(layer) for layer in sorted(sums)]


class _InputSampler(Observer):
    """Copies inputs of each matrix to `inputs`: (tensor, matrix) -> float32 [n <= MAX_INPUTS, columns]; None: no copies."""

    def __init__(self, inputs: dict[tuple[str, int], np.ndarray] | None):
        self.inputs = inputs

    def wants_input(self, op: Op) -> bool:
        return isinstance(op, Linear | ExpertLinear | LatentAttention | GroupedLinear)

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        if self.inputs is not None and (weight.name, matrix) not in self.inputs:
            self.inputs[weight.name, matrix] = x[:: max(1, len(x) // MAX_INPUTS)][:MAX_INPUTS].copy()


class _LayerObserver(Observer):
    """Calls on_layer(index of the layer, its output float32 [n, n_embd]), which must not change the array."""

    def __init__(self, model: Model, on_layer: Callable[[int, np.ndarray], None]):
        self.layers = {value.index: layer for layer, value in enumerate(model.graph.layers)}
        self.on_layer = on_layer

    def wants_output(self, op: Op) -> bool:
        return op.out.index in self.layers

    def on_output(self, op: Op, out: np.ndarray) -> None:
        self.on_layer(self.layers[op.out.index], out)


class _NonfiniteOutput(Exception):
    def __init__(self, model: Model):
        self.model = model


class _OtherModelFailed(Exception):
    """Ends the run of a model after an exception in the run of the other one."""


def _run_both(a: Model, b: Model, window: np.ndarray, sums: dict[int, _LayerSums]) -> tuple[np.ndarray, np.ndarray]:
    """Runs a window through both models and adds the error of each layer to `sums`. Returns the last outputs of a and b.

    b runs on a thread of its own, at most one layer ahead. Raises _NonfiniteOutput with the model whose layer is not finite.
    """
    outputs_b: queue.Queue[np.ndarray] = queue.Queue(1)
    result_b: list[np.ndarray | BaseException] = []
    a_has_ended = threading.Event()

    def send_layer(layer: int, output: np.ndarray) -> None:
        copy = output.copy()
        while not a_has_ended.is_set():
            try:
                return outputs_b.put(copy, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
        raise _OtherModelFailed

    def run_b() -> None:
        try:
            result_b.append(b.hidden([(b.new_cache(len(window)), window)])[0])
        except BaseException as error:
            result_b.append(error)

    def receive_layer() -> np.ndarray:
        while True:
            try:
                return outputs_b.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not thread.is_alive() and outputs_b.empty():
                    raise _OtherModelFailed from None

    def compare_layer(layer: int, output_a: np.ndarray) -> None:
        output_b = receive_layer()
        for model, output in ((a, output_a), (b, output_b)):
            if not np.isfinite(output).all():
                raise _NonfiniteOutput(model)
        if output_a.shape != output_b.shape:
            sizes = f"layers of {output_a.shape[1]} against {output_b.shape[1]} numbers"
            raise PlanError(f"the models cannot be compared: {sizes}")
        sums.setdefault(layer, _LayerSums()).add(output_a, output_b)

    thread = threading.Thread(target=run_b, name="compare", daemon=True)
    with a.observing(_LayerObserver(a, compare_layer)), b.observing(_LayerObserver(b, send_layer)):
        thread.start()
        try:
            hidden_a = a.hidden([(a.new_cache(len(window)), window)])[0]
        except _OtherModelFailed:
            hidden_a = np.empty(0)  # the exception of b is raised below
        finally:
            a_has_ended.set()
            thread.join()
    if isinstance(result_b[0], BaseException):
        raise result_b[0]
    return hidden_a, result_b[0]


# -- weights


def _compare_weights(
    comparison: Comparison,
    a: Model,
    b: Model,
    pattern: NamePattern,
    inputs: dict[tuple[str, int], np.ndarray],
    on_tensor: OnTensor | None,
    workers: Workers,
) -> None:
    """Fills tensors, only_a, only_b and reshaped. inputs: see `_InputSampler`."""
    tensors_a, tensors_b = ({name: t for name, t in m.source.tensors.items() if pattern.search(name)} for m in (a, b))
    comparison.only_a = [name for name in tensors_a if name not in tensors_b]
    comparison.only_b = [name for name in tensors_b if name not in tensors_a]
    for name, tensor in tensors_a.items():
        other = tensors_b.get(name)
        if other is None:
            continue
        if other.shape != tensor.shape:
            comparison.reshaped.append(name)
            continue
        error = _tensor_error(tensor, other, inputs, workers)
        comparison.tensors.append(error)
        if on_tensor is not None:
            on_tensor(error.nbytes_a + error.nbytes_b, name)


def weights_bytes(tensor: SourceTensor, threads: int) -> int:
    """Bytes that so many threads have, at the most, while a tensor's weights are compared."""
    columns, rows, _ = dims(tensor.shape)
    parts = islice(_row_ranges(tensor, columns, rows), threads)
    return sum(min(THREAD_BYTES, _WEIGHT_BYTES * (stop - start) * columns) for start, stop in parts)


def weights_seconds(a: Mapping[str, SourceTensor], b: Mapping[str, SourceTensor], names: Sequence[str]) -> float:
    """Seconds of a thread for comparing these tensors: of each pair of types the largest is timed, by its first rows."""
    count, largest = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    for name in names:
        pair = a[name].source_type, b[name].source_type
        count[pair] += a[name].n_elements
        if pair not in largest or a[largest[pair]].n_elements < a[name].n_elements:
            largest[pair] = name
    return sum(count[pair] * _seconds_of_a_weight(a[name], b[name]) for pair, name in largest.items())


def _seconds_of_a_weight(a: SourceTensor, b: SourceTensor) -> float:
    rows, calls, worker = min(_TIMED_ROWS, a.shape[1] if len(a.shape) > 1 else 1), 0, Workers(1)
    first = [replace(tensor, shape=(tensor.shape[0], rows) if len(tensor.shape) > 1 else tensor.shape[:1]) for tensor in (a, b)]
    _tensor_error(first[0], first[1], {}, worker)  # which may compile kernels
    begun = time.thread_time()
    while not calls or time.thread_time() - begun < _TIMED:
        _tensor_error(first[0], first[1], {}, worker)
        calls += 1
    return (time.thread_time() - begun) / (calls * first[0].n_elements)


def _tensor_error(a: SourceTensor, b: SourceTensor, inputs: dict[tuple[str, int], np.ndarray], workers: Workers) -> TensorError:
    columns, rows, _ = dims(a.shape)
    ranges = list(_row_ranges(a, columns, rows))

    def sums(row_range: tuple[int, int]) -> np.ndarray:
        """Squares of the error and of the weights, and of the errors of products and of products."""
        weights = a.read(*row_range)
        difference = b.read(*row_range) - weights
        found = [np.einsum("ij,ij->", x, x, dtype=np.float64) for x in (difference, weights)]
        x = inputs.get((a.name, row_range[0] // rows))
        if x is None or x.shape[1] != columns:
            return np.array([*found, 0.0, 0.0])
        return np.array([*found, _product_norm_squared(x, difference), _product_norm_squared(x, weights)])

    parts = [np.zeros(4)]
    if not all(_same_bytes(a, b, *row_range) for row_range in ranges):
        parts += workers.map(sums, ranges)
    error_squared, norm_squared, product_error_squared, product_squared = map(float, sum(parts, np.zeros(4)))
    relative = float(np.sqrt(error_squared / norm_squared)) if norm_squared else float("inf") if error_squared else 0.0
    product = None
    if any((a.name, matrix) in inputs for matrix in range(a.n_rows // rows)):
        product = float(np.sqrt(product_error_squared / product_squared)) if product_squared else 0.0
    return TensorError(a.name, a.source_type, b.source_type, stored_nbytes(a), stored_nbytes(b), relative, product)


def _product_norm_squared(x: np.ndarray, weights: np.ndarray) -> float:
    """The sum of the squares of x [n, columns] times weights [rows, columns], transposed. In float64: of float32 products the
    BLAS library, and with it the number of threads, would decide the last digits that are reported."""
    product = x.astype(np.float64) @ weights.T.astype(np.float64)
    return float(np.einsum("ij,ij->", product, product))


def _row_ranges(tensor: SourceTensor, columns: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows (start, stop) of at most ROWS_BYTES in float32, none of which spans two matrices."""
    step = max(16, ROWS_BYTES // (4 * columns) // 16 * 16)
    for first in range(0, tensor.n_rows, rows):
        for start in range(first, first + rows, step):
            yield start, min(start + step, first + rows)


def _same_bytes(a: SourceTensor, b: SourceTensor, start: int, stop: int) -> bool:
    if a.raw is None or b.raw is None or a.source_type != b.source_type:
        return False
    group = a.stored.rows if a.stored is not None else 1
    if start % group or stop % group:
        return False  # rows of an interleaved type can be read in whole groups only
    return np.array_equal(a.raw(start, stop), b.raw(start, stop))
