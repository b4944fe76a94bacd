"""Gradients of activations: of a loss over a model's predictions, at what each of its matrices computes.

The graph is cut behind its layers. A forward pass without gradients keeps what one part makes and others read: the residual
stream behind each layer, as a rule. Then, from the head and the last layer to the first, each part is computed again, by the
functions of the torch backend with torch's autograd, and what its inputs get is carried on to the parts before it. So nothing
but one part's intermediate values is ever kept, and a model of any size is read twice, part by part, for all windows together.
Weights have no gradients.

The loss is the sum over positions of -log p(label) with a label drawn from the model's own distribution p of that position, so
that the mean of g g^T is the Fisher matrix (arXiv:1503.05671, section 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ....data_classes import dataclass
from ....formats import PlanError
from ....operating_system.memory import trim_free_memory
from ...graph import Graph, Observer, Op, Weight, ops
from ...graph.gradients import OnGradient, OutputGradient, is_choice, observed_weights, reached_ops
from ...graph.signatures import unsupported
from .device_pass import DevicePass, Result, to_numpy
from .differentiable import CacheKey, GradientCache, latent_attention, operand_value
from .drawn_labels import loss_gradient, uniform_draws
from .functions import FUNCTIONS, SUPPORT
from .gradient_parts import GraphPart, cut_graph, kept_bytes
from .product_speed import products_per_second
from .weights import Weights

_HOST = torch.device("cpu")  # where what is kept between parts lies, whatever device computes
GROUP_TOKENS = 2048  # of the windows that are computed in one pass, so that rows of a weight are decoded for all of them
BACK = 3  # times what a part takes without gradients it takes to compute it with them
_HEAD = 2  # the same of the head, which is computed once
_EVERY = 0.5  # seconds between two reports of what is computed
SCRATCH = 256 << 20  # bytes of the scores of attention that are kept for gradients
HEAD_ROWS = 128  # tokens whose logits are in memory at a time


# What an op's weight made: where it is in the graph of gradients, so that its numbers need not stay, with a factor.
Made = tuple[Op, Weight, GradientEdge, float]


@dataclass
class WindowGroup:
    """Windows that are computed in one pass, and what is kept of them between parts, in the machine's memory: values, rows in
    caches, and the gradients of both so far."""

    windows: np.ndarray
    values: dict[int, Result] = field(default_factory=dict)
    rows: list[dict[CacheKey, Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    row_gradients: list[dict[CacheKey, Tensor]] = field(default_factory=list)


@dataclass
class _Again:
    """A part that was computed with gradients: what it read, values and rows of caches; what others read of its values, and
    routings; what was captured of ops (op, weight, where its result is in the graph of gradients, factor of its gradient)."""

    leaves: dict[int, Result]
    rows: list[dict[CacheKey, Tensor]]
    caches: list[GradientCache]
    values: dict[int, Result]
    made: list[Made] = field(default_factory=list)


class _Computed:
    """How many weights have been multiplied with all tokens of a group, in threads, of those that have to be. on_share: called
    within `report`."""

    def __init__(self, total: float, on_share: Callable[[float], None]):
        self._total, self._done, self._on_share, self._lock = max(1.0, total), 0.0, on_share, Lock()

    def add(self, weights: float) -> None:
        with self._lock:
            self._done += weights

    def report(self) -> None:
        self._on_share(min(1.0, self._done / self._total))


class Gradients:
    """Computes gradients for one graph.

    graph    with a head
    weights  its tensors for products in float32
    device   where everything is computed
    threads  on the processor: groups of windows that are computed at a time, each by one thread, so that the results have the
             same bits for any number of them
    is_whole whether the graph is one part, which needs the memory of all layers at once
    copied_bytes  what weights may take that had to be copied from their file to memory; more are read again for each part
    parts    into which the graph is cut; reached: its ops whose results have gradients

    Raises PlanError for a graph without a head, and for an op of which there is no derivative.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        device: torch.device | str = "cpu",
        threads: int = 1,
        is_whole: bool = False,
        copied_bytes: int = 4 << 30,
    ):
        self.graph, self.weights, self.device, self.threads = graph, weights, torch.device(device), threads
        self._host = self.device if self.device.type == "meta" else _HOST
        path = weights.source.path
        if graph.logits is None:
            raise PlanError(
                f"{path}: {graph.architecture} has no output matrix: it predicts no tokens, so that nothing has a gradient"
            )
        for op in (*graph.ops, *graph.head):
            check_derivative(op, str(path))
        self._copied_bytes, self._computed = copied_bytes, _Computed(0, lambda share: None)
        self.parts = cut_graph(graph, is_whole)
        self.reached, self._in_head = reached_ops(graph), set(map(id, graph.head))

    @property
    def _head_work(self) -> float:
        """Weights of the head, as often as they are multiplied with each token."""
        return _HEAD * _weights_of(self.graph.head)

    def _expect(self, work: float, on_share: Callable[[float], None]) -> None:
        """Shares are reported of so many weights that are multiplied with the tokens of a group."""
        self._computed = _Computed(work, on_share)

    @property
    def identity(self) -> tuple[str, str]:
        """What the bits of gradients depend on beside model and windows: the kind of device, and torch."""
        return self.device.type, torch.__version__

    @property
    def kept_bytes(self) -> int:
        """Bytes per token that are kept between parts while a batch of windows is computed."""
        return kept_bytes(self.graph, self.parts)

    def products_per_second(self, pieces: int) -> float:
        """Multiplications of the threads that have one of so many groups of windows or other pieces, or of the device, per
        second: those of products of float32."""
        return products_per_second(self.device, min(self.threads, pieces))

    def windows_of_group(self, n_ctx: int) -> int:
        """Windows that are computed in one pass: their number depends on nothing but n_ctx."""
        return max(1, GROUP_TOKENS // n_ctx)

    def groups(self, windows: np.ndarray) -> list[slice]:
        """Windows int64 [n, n_ctx] that are computed together."""
        size = self.windows_of_group(windows.shape[1])
        return [slice(first, min(first + size, len(windows))) for first in range(0, len(windows), size)]

    def run(
        self,
        windows: np.ndarray,
        seed: int,
        wanted: Collection[str],
        on_gradient: OnGradient,
        on_share: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Computes the gradients of windows, each from scratch: int64 [n, n_ctx].

        wanted: names of the weights whose gradients `on_gradient` gets: op by op from the last part to the first, for each in
        the order of the windows; weights without a gradient are left out. It is called by the thread that calls `run`, as is
        `on_share`, with the share of all products that are made. seed: of the labels, which depend on it and the tokens of a
        window alone.
        """
        groups = [WindowGroup(windows[part]) for part in self.groups(windows)]
        chosen = {id(op) for op in self.reached if any(weight.name in wanted for weight in observed_weights(op))}
        first = next((i for i, part in enumerate(self.parts) if any(id(op) in chosen for op in part.ops)), len(self.parts))
        forth, back = (sum(_weights_of(part.ops) for part in parts) for parts in (self.parts, self.parts[first:]))
        self._expect(len(groups) * (forth + self._head_work + BACK * back), on_share)
        with self._one_thread_each() as pool:
            for part in self.parts:
                for _ in self._each(pool, groups, partial(self._forward, part)):
                    pass
            self._report(self._each(pool, list(self._head_pieces(groups, seed)), partial(self._head, wanted)), on_gradient)
            for number in reversed(range(first, len(self.parts))):
                run = partial(self._backward, self.parts[number], wanted, chosen, number == first)
                self._report(self._each(pool, groups, run), on_gradient)
        on_share(1.0)

    def _head_pieces(self, groups: Sequence[WindowGroup], seed: int) -> Iterator[tuple[WindowGroup, slice, np.ndarray]]:
        """Tokens whose logits are in memory at a time, which threads take by themselves, and the draws of their labels."""
        for group in groups:
            draws = np.concatenate([uniform_draws(seed, window) for window in group.windows])
            hidden = as_tensor(group.values[self.graph.hidden.index])
            group.gradients = {self.graph.hidden.index: torch.empty_like(hidden)}
            for rows in (slice(first, first + HEAD_ROWS) for first in range(0, len(hidden), HEAD_ROWS)):
                yield group, rows, draws[rows]

    # --- threads ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _one_thread_each(self) -> Iterator[ThreadPoolExecutor | None]:
        """On the processor: threads for groups, each of which torch computes with one thread."""
        if self.device.type != "cpu":
            yield None
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield pool
        finally:
            torch.set_num_threads(before)

    def _each(self, pool: ThreadPoolExecutor | None, pieces: Sequence[Any], run: Callable[[Any], Any]) -> Iterator[Any]:
        """What `run` gives for each group or other piece, in order; no more are begun than there are threads and one more."""
        self.weights.release(self._copied_bytes)
        trim_free_memory()  # of the part before, which had blocks of other sizes
        with self.weights.visit():
            if pool is None:
                for piece in pieces:
                    yield run(piece)
                    self._computed.report()
                return
            waiting: deque[Future] = deque()
            for piece in pieces:
                waiting.append(pool.submit(run, piece))
                if len(waiting) > self.threads:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())

    def _result(self, future: Future) -> Any:
        """What a thread computes; meanwhile the share that is done is reported."""
        while not wait([future], timeout=_EVERY).done:
            self._computed.report()
        self._computed.report()
        return future.result()

    def _report(self, captured: Iterator[list[OutputGradient]], on_gradient: OnGradient) -> None:
        """Tells of the gradients of each group, in the order of the windows."""
        for each in captured:
            for gradient in each:
                on_gradient(gradient)
                self._computed.report()

    # --- one part, one group ------------------------------------------------------------------------------------------

    def _step(self, windows: np.ndarray, caches: Sequence[GradientCache]) -> DevicePass:
        n_ctx = windows.shape[1]
        step = DevicePass(windows.reshape(-1), [(cache, n_ctx) for cache in caches], Observer(), scratch=SCRATCH)  # type: ignore[list-item]
        step.device = self.device
        return step

    def _caches(self, rows: Sequence[dict[CacheKey, Tensor]]) -> list[GradientCache]:
        return [GradientCache(self.graph.cache, self.device, given) for given in rows]

    def _forward(self, part: GraphPart, group: WindowGroup) -> None:
        """Computes a part without gradients, and keeps what others read."""
        if not group.rows:
            group.rows = [{} for _ in group.windows]
            group.row_gradients = [{} for _ in group.windows]
        caches = self._caches([{key: own[key].to(self.device) for key in part.takes} for own in group.rows])
        step = self._step(group.windows, caches)
        values = {index: _moved(group.values[index], self.device) for index in part.reads}
        with torch.no_grad():
            for op in part.ops:
                self._compute(op, step, values)
        for index in (*part.makes, self.graph.hidden.index):
            if index in values:
                group.values[index] = _moved(values[index], self._host)
        for own, cache in zip(group.rows, caches, strict=True):
            own.update({key: cache.rows[key].to(self._host) for key in part.gives})

    def _head(self, wanted: Collection[str], piece: tuple[WindowGroup, slice, np.ndarray]) -> list[OutputGradient]:
        """Draws labels of some tokens of a group, and computes the gradients of the loss at the input of the head."""
        group, rows, draws = piece
        leaf = as_tensor(group.values[self.graph.hidden.index])[rows].to(self.device).detach().requires_grad_()
        step = self._step(group.windows.reshape(1, -1)[:, rows], [])
        values: dict[int, Result] = {self.graph.hidden.index: leaf}
        made: list[Made] = []
        with torch.enable_grad():
            for op in self.graph.head:
                is_wanted = any(weight.name in wanted for weight in observed_weights(op))
                self._compute(op, step, values, made if is_wanted else None)
        assert self.graph.logits is not None
        out = as_tensor(values[self.graph.logits.index])
        inputs = [leaf, *(x for _, _, x, _ in made)]
        grads = torch.autograd.grad(out, inputs, loss_gradient(out.detach(), draws), allow_unused=True)
        self._computed.add(self._head_work * len(leaf) / group.windows.size)
        group.gradients[self.graph.hidden.index][rows] = 0 if grads[0] is None else grads[0].to(self._host)
        pairs = zip(made, grads[1:], strict=True)
        return [OutputGradient(op, weight, to_numpy(grad)[:, None]) for (op, weight, _, _), grad in pairs if grad is not None]

    def _backward(
        self, part: GraphPart, wanted: Collection[str], chosen: Collection[int], is_end: bool, group: WindowGroup
    ) -> list[OutputGradient]:
        """Computes a part again, with gradients, which it adds to those of what it reads. is_end: they are not needed."""
        again = self._again(part, group, self.weights, chosen)
        made = [each for each in again.made if each[1].name in wanted]
        captured = self._carry_back(part, group, again, [x for _, _, x, _ in made], is_end)
        return [
            _captured(op, weight, grad if factor == 1 else grad * factor, again.values)
            for (op, weight, _, factor), grad in zip(made, captured, strict=True)
            if grad is not None
        ]

    def _again(self, part: GraphPart, group: WindowGroup, weights: Weights, chosen: Collection[int] = ()) -> _Again:
        """Computes a part again, with gradients of everything that it reads. chosen: ops whose results are to be captured."""
        leaves = {index: _leaf(_moved(group.values[index], self.device)) for index in part.reads}
        rows = [{key: own[key].to(self.device).detach().requires_grad_() for key in part.takes} for own in group.rows]
        again = _Again(leaves, rows, self._caches(rows), dict(leaves))
        step = self._step(group.windows, again.caches)
        with torch.enable_grad():
            for op in part.ops:
                self._compute(op, step, again.values, again.made if id(op) in chosen else None, weights)
        routings = (op.routing.index for op in part.ops if isinstance(op, ops.ExpertLinear))
        stay = {*part.makes, self.graph.hidden.index, *routings}
        again.values = {index: x for index, x in again.values.items() if index in stay}
        return again

    def _carry_back(
        self, part: GraphPart, group: WindowGroup, again: _Again, inputs: Sequence[Tensor | GradientEdge], is_end: bool
    ) -> Sequence[Tensor | None]:
        """Takes the gradients of what a part made through it, adds them to those of what it read, and forgets what it made.
        Returns those of `inputs`, tensors within the part."""
        outputs, grads = [], []
        for index in dict.fromkeys((*part.makes, self.graph.hidden.index)):
            if index in again.values and index not in again.leaves and index in group.gradients:
                outputs.append(_floats(again.values[index]))
                grads.append(group.gradients.pop(index))
        for cache, own in zip(again.caches, group.row_gradients, strict=True):
            for key in part.gives:
                if key in own:
                    outputs.append(cache.rows[key])
                    grads.append(own.pop(key))
        kept = [(out, grad.to(self.device)) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        leaves = [] if is_end else again.leaves.items()
        carried = [(index, _floats(leaf)) for index, leaf in leaves if _floats(leaf).requires_grad]
        taken = [] if is_end else [(i, key, row) for i, own in enumerate(again.rows) for key, row in own.items()]
        needed = [*inputs, *(leaf for _, leaf in carried), *(row for _, _, row in taken)]
        if not kept or not needed:
            return [None] * len(inputs)
        found = torch.autograd.grad([out for out, _ in kept], needed, [grad for _, grad in kept], allow_unused=True)
        rest = found[len(inputs) :]
        for (index, _), grad in zip(carried, rest, strict=False):
            self._add(group.gradients, index, grad)
        for (i, key, _), grad in zip(taken, rest[len(carried) :], strict=True):
            self._add(group.row_gradients[i], key, grad)
        for index in part.makes:
            group.values.pop(index, None)
        for own in group.rows:
            for key in part.gives:
                own.pop(key, None)
        return found[: len(inputs)]

    def _add(self, sums: dict[Any, Tensor], key: Any, grad: Tensor | None) -> None:
        """Adds a gradient to those of a value, in the machine's memory."""
        if grad is not None:
            grad = grad.to(self._host)
            sums[key] = sums[key] + grad if key in sums else grad

    def _compute(
        self,
        op: Op,
        step: DevicePass,
        values: dict[int, Result],
        made: list[Made] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Runs an op, and adds its results to the values; and to `made` what each of its weights makes, with the factor of its
        gradient. weights: those of the graph, unless given."""
        count = 0 if id(op) in self._in_head else op.multiplied
        step.op, weights = None, weights or self.weights
        function, names = FUNCTIONS[type(op)]
        if isinstance(op, ops.LatentAttention):
            arguments = {name: operand_value(op, name, values, weights, self.device) for name in names if name != "out"}
            result, parts = latent_attention(step, op, arguments)
            forms = float((0 in parts) + (1 in parts))
            if made is not None:
                made += [(op, op.observed[number], get_gradient_edge(x), forms) for number, x in parts.items()]
        else:
            arguments = {name: operand_value(op, name, values, weights, self.device) for name in names}
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_choice(op)):
                result = function(step, **arguments)
            if made is not None:
                result = result if result.requires_grad else result.detach().requires_grad_()
                made.append((op, op.weights[0], get_gradient_edge(result), 1.0))
        self._computed.add(count)
        results = result if isinstance(op, ops.Split) else [result]
        if count and (x := results[0]) is not None and isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda grad: self._computed.add((BACK - 1) * count))
        values.update(zip((out.index for out in op.outputs), results, strict=True))


def _weights_of(some: Sequence[Op]) -> int:
    return sum(op.multiplied for op in some)


def check_derivative(op: Op, path: str) -> None:
    """Raises PlanError, naming the op, where the torch backend has no function for it, or not for one of its options."""
    known = SUPPORT.get(type(op))
    problem = "" if known is None else unsupported(op, known)
    if problem is not None:
        option = f" with {problem}" if problem else ""
        raise PlanError(f"{path}: gradients need a derivative of every op, and op {type(op).__name__}{option} has none")


def _captured(op: Op, weight: Weight, g: Tensor, values: Mapping[int, Result]) -> OutputGradient:
    rows = to_numpy(g)
    if isinstance(op, ops.ExpertLinear):
        return OutputGradient(op, weight, rows, to_numpy(values[op.routing.index][0]))
    if isinstance(op, ops.GroupedLinear):
        return OutputGradient(op, weight, rows.reshape(len(rows), op.x.shape[0], -1))
    return OutputGradient(op, weight, rows if rows.ndim == 3 else rows[:, None])


def _floats(value: Result) -> Tensor:
    """What of a value has a gradient: of a routing the weights."""
    return value[1] if isinstance(value, tuple) else value


def _moved(value: Result, device: torch.device) -> Result:
    return tuple(part.to(device) for part in value) if isinstance(value, tuple) else value.to(device)


def _leaf(value: Result) -> Result:
    if isinstance(value, tuple):
        return value[0], value[1].detach().requires_grad_()
    return value.detach().requires_grad_()


def as_tensor(value: Result) -> Tensor:
    assert isinstance(value, Tensor)
    return value
