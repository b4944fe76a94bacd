"""How far a model's layers and weights are from another's: where a quantisation goes wrong, and where it costs most.

Both graphs read the same tokens at the same time, layer by layer: only one layer's outputs of each are in memory.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...formats import MillError, PlanError, SourceTensor, dims
from ..backends.cpu.kernels.gemm.gemm import matmul
from ..graph import Observer, Op, Weight
from ..graph.ops import ExpertLinear, LatentAttention, Linear
from ..model import Model
from .divergence import score
from .perplexity import windows_of
from .score_statistics import Tally

ROWS_BYTES = 16 << 20  # decoded weights of one tensor that are in memory at a time
PROBES = 64  # inputs of a product that its error is measured with
_PATIENCE = 0.2  # seconds between looks at whether the other model is still running


@dataclass(frozen=True)
class LayerError:
    """relative: |b - a| / |a| over all outputs of the layer; worst: that of the worst token; cosine: mean over the tokens."""

    layer: int
    relative: float
    worst: float
    cosine: float


@dataclass(frozen=True)
class TensorError:
    """relative: |b - a| / |a| of the decoded weights. product: |x (b - a)| / |x a| over inputs x that model a saw; None if it
    was not measured or the tensor is no factor of a product."""

    name: str
    type_a: str
    type_b: str
    nbytes_a: int
    nbytes_b: int
    relative: float
    product: float | None = None


@dataclass
class Comparison:
    """What sets model b apart from model a; a is the better one, as a rule.

    layers     one per layer, in order; after a layer that is not finite there are no more
    output     figures of the predictions: kld_mean, top1_agreement, ratio and what else `Tally.comparison` gives
    tensors    of both models; only_a, only_b: names that the other has not, reshaped: those that have another shape there
    nonfinite  the first output that is not finite, in words; '' if there is none
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
        return asdict(self)


OnTensor = Callable[[int, str], None]


def compare(
    a: Model,
    b: Model,
    tokens_or_text: str | Sequence[int] | np.ndarray | None,
    n_ctx: int = 512,
    chunks: int | None = 1,
    weights: str | None = "",
    products: bool = False,
    on_tensor: OnTensor | None = None,
) -> Comparison:
    """Compares layers on windows of a text (None: not), then weights.

    weights: a regex that the names of the tensors to compare have in them; '' takes all, None none. products: the errors of
    products too, on the first window. on_tensor is called with (bytes of a and b, name) after each tensor.
    Raises PlanError for models of different shape, vocabulary or text that is too short.
    """
    found = Comparison()
    inputs: dict[tuple[str, int], np.ndarray] = {}
    if tokens_or_text is not None:
        if a.n_layers != b.n_layers or a.n_vocab != b.n_vocab:
            shapes = (f"{m.n_layers} layers and {m.n_vocab} tokens" for m in (a, b))
            raise PlanError(f"the models cannot be compared: {' against '.join(shapes)}")
        _compare_layers(found, a, b, windows_of(a, tokens_or_text, n_ctx, chunks), inputs if products else None)
    if weights is not None and not found.nonfinite:
        _compare_weights(found, a, b, weights, inputs, on_tensor)
    return found


# -- layers


class _Sums:
    """A layer's errors so far."""

    def __init__(self) -> None:
        self.apart = self.size = self.cosines = self.worst = 0.0
        self.tokens = 0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        size, other, both = (np.einsum("ij,ij->i", x, y, dtype=np.float64) for x, y in ((a, a), (b, b), (a, b)))
        d = b - a
        apart = np.einsum("ij,ij->i", d, d, dtype=np.float64)
        self.apart, self.size = self.apart + apart.sum(), self.size + size.sum()
        self.cosines += (both / np.sqrt(np.maximum(size * other, 1e-300))).sum()
        self.worst = max(self.worst, float(np.sqrt(apart / np.maximum(size, 1e-300)).max()))
        self.tokens += len(a)

    def error(self, layer: int) -> LayerError:
        relative = float(np.sqrt(self.apart / self.size)) if self.size else 0.0
        return LayerError(layer, relative, self.worst, float(self.cosines / self.tokens))


def _compare_layers(
    found: Comparison, a: Model, b: Model, windows: np.ndarray, inputs: dict[tuple[str, int], np.ndarray] | None
) -> None:
    sums: dict[int, _Sums] = {}
    tally, first = Tally(), windows.shape[1] // 2
    for number, window in enumerate(windows):
        # An observed pass may differ from another in its last bits, so the inputs of both models are observed or of neither.
        probes = [_Probe(inputs), _Probe(None)] if inputs is not None and number == 0 else [Observer(), Observer()]
        try:
            with a.observing(probes[0]), b.observing(probes[1]):
                hidden = _in_lockstep(a, b, window, sums)
                scored = score(b, hidden[1][first:-1], window[first + 1 :], a, hidden[0][first:-1])
        except _NotFinite as broken:
            found.nonfinite = str(broken.model.explain_nonfinite(window))
            break
        for losses, model in ((scored.base_losses, a), (scored.losses, b)):
            if losses is not None and not np.isfinite(losses).all():
                found.nonfinite = str(model.explain_nonfinite(window))
        if found.nonfinite:
            break
        tally.add(scored)
        found.tokens += len(window)
        found.output = tally.perplexity() | tally.comparison()
    found.layers = [sums[layer].error(layer) for layer in sorted(sums)]


class _Probe(Observer):
    """Keeps some of the inputs of each matrix: (tensor, matrix) -> float32 [PROBES at most, columns]; None: none."""

    def __init__(self, inputs: dict[tuple[str, int], np.ndarray] | None):
        self.inputs = inputs

    def wants_input(self, op: Op) -> bool:
        return isinstance(op, Linear | ExpertLinear | LatentAttention)

    def on_input(self, op: Op, weight: Weight, matrix: int, x: np.ndarray) -> None:
        if self.inputs is not None and (weight.name, matrix) not in self.inputs:
            self.inputs[weight.name, matrix] = x[:: max(1, len(x) // PROBES)][:PROBES].copy()


class _Layers(Observer):
    """Calls on_layer(layer, its output float32 [n, n_embd], to be read only)."""

    def __init__(self, model: Model, on_layer: Callable[[int, np.ndarray], None]):
        self.layers = {value.index: layer for layer, value in enumerate(model.graph.layers)}
        self.on_layer = on_layer

    def wants_output(self, op: Op) -> bool:
        return op.out.index in self.layers

    def on_output(self, op: Op, out: np.ndarray) -> None:
        self.on_layer(self.layers[op.out.index], out)


class _NotFinite(Exception):
    def __init__(self, model: Model):
        self.model = model


class _Stopped(Exception):
    """The other model has failed."""


def _in_lockstep(a: Model, b: Model, window: np.ndarray, sums: dict[int, _Sums]) -> list[np.ndarray]:
    """Runs the window through both; adds each layer's error to sums. Returns the last outputs, [a's, b's].

    b runs on a thread of its own, at most one layer ahead. Raises _NotFinite with the model whose layer is not.
    """
    ready: queue.Queue[tuple[int, np.ndarray]] = queue.Queue(1)
    outcome: list[np.ndarray | BaseException] = []
    over = threading.Event()

    def deliver(layer: int, x: np.ndarray) -> None:
        item = layer, x.copy()
        while not over.is_set():
            try:
                return ready.put(item, timeout=_PATIENCE)
            except queue.Full:
                continue
        raise _Stopped

    def run_b() -> None:
        try:
            outcome.append(b.hidden([(b.new_cache(len(window)), window)])[0])
        except BaseException as error:
            outcome.append(error)

    def receive() -> tuple[int, np.ndarray]:
        while True:
            try:
                return ready.get(timeout=_PATIENCE)
            except queue.Empty:
                if not thread.is_alive() and ready.empty():
                    raise _Stopped from None

    def meet(layer: int, x: np.ndarray) -> None:
        _, other = receive()
        for model, values in ((a, x), (b, other)):
            if not np.isfinite(values).all():
                raise _NotFinite(model)
        if x.shape != other.shape:
            raise PlanError(f"the models cannot be compared: layers of {x.shape[1]} against {other.shape[1]} numbers")
        sums.setdefault(layer, _Sums()).add(x, other)

    thread = threading.Thread(target=run_b, name="compare", daemon=True)
    with a.observing(_Layers(a, meet)), b.observing(_Layers(b, deliver)):
        thread.start()
        try:
            hidden = a.hidden([(a.new_cache(len(window)), window)])[0]
        except _Stopped:
            hidden = np.empty(0)
        finally:
            over.set()
            thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return [hidden, outcome[0]]


# -- weights


def _compare_weights(
    found: Comparison,
    a: Model,
    b: Model,
    pattern: str,
    inputs: dict[tuple[str, int], np.ndarray],
    on_tensor: OnTensor | None,
) -> None:
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise PlanError(f"{pattern!r} is no regular expression: {error}") from None
    there = [{name: t for name, t in m.source.tensors.items() if wanted.search(name)} for m in (a, b)]
    found.only_a = [name for name in there[0] if name not in there[1]]
    found.only_b = [name for name in there[1] if name not in there[0]]
    for name, tensor in there[0].items():
        other = there[1].get(name)
        if other is None:
            continue
        if other.shape != tensor.shape:
            found.reshaped.append(name)
            continue
        found.tensors.append(_tensor_error(tensor, other, inputs))
        if on_tensor is not None:
            on_tensor(found.tensors[-1].nbytes_a + found.tensors[-1].nbytes_b, name)


def tensor_nbytes(tensor: SourceTensor) -> int:
    """Bytes that it is stored in; of a type that GGUF does not have: as bf16."""
    kind = tensor.stored
    return kind.nbytes(tensor.shape) if kind is not None and kind.is_known else 2 * tensor.n_elements


def _tensor_error(a: SourceTensor, b: SourceTensor, inputs: dict[tuple[str, int], np.ndarray]) -> TensorError:
    apart = size = moved = scale = 0.0
    columns, rows, _ = dims(a.shape)
    if not all(_same_bytes(a, b, *run) for run in _runs(a, columns, rows)):
        for start, stop in _runs(a, columns, rows):
            one = a.read(start, stop)
            d = b.read(start, stop) - one
            apart += float(np.einsum("ij,ij->", d, d, dtype=np.float64))
            size += float(np.einsum("ij,ij->", one, one, dtype=np.float64))
            x = inputs.get((a.name, start // rows))
            if x is not None and x.shape[1] == columns:
                moved += float(np.square(matmul(x, d.T[None])).sum(dtype=np.float64))
                scale += float(np.square(matmul(x, one.T[None])).sum(dtype=np.float64))
    relative = float(np.sqrt(apart / size)) if size else float("inf") if apart else 0.0
    measured = any((a.name, matrix) in inputs for matrix in range(a.n_rows // rows))
    product = (float(np.sqrt(moved / scale)) if scale else 0.0) if measured else None
    return TensorError(a.name, a.source_type, b.source_type, tensor_nbytes(a), tensor_nbytes(b), relative, product)


def _runs(tensor: SourceTensor, columns: int, rows: int) -> Iterator[tuple[int, int]]:
    """Runs of rows, none of which crosses from one matrix into the next."""
    step = max(16, ROWS_BYTES // (4 * columns) // 16 * 16)
    for first in range(0, tensor.n_rows, rows):
        for start in range(first, first + rows, step):
            yield start, min(start + step, first + rows)


def _same_bytes(a: SourceTensor, b: SourceTensor, start: int, stop: int) -> bool:
    if a.raw is None or b.raw is None or a.source_type != b.source_type:
        return False
    groups = a.stored.rows if a.stored is not None else 1
    if start % groups or stop % groups:
        return False  # interleaved rows are only whole in groups
    return np.array_equal(a.raw(start, stop), b.raw(start, stop))


def check(found: Comparison) -> None:
    """Raises MillError when an output was not finite."""
    if found.nonfinite:
        raise MillError(found.nonfinite)
