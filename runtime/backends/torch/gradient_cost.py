"""What computing gradients takes of memory, and of work beside products of weights: counted on tensors without numbers (torch's
device "meta"), as they come and go."""

from __future__ import annotations

import weakref
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...graph import Value, Weight
from ...graph.gradients import observed_weights
from ...graph.values import CacheSpec, RoutingValue
from .device_pass import Result
from .differentiable import CacheKey
from .gradient_parts import GraphPart
from .gradients import HEAD_ROWS, Gradients, WindowGroup
from .weights import Weights

_META = torch.device("meta")
_LOGIT_BYTES = 24  # of a logit: the number, its probability, that and the sums in float64, in whose place gradients come
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)
_TILE_BYTES = 64 << 20  # of weights that are decoded for a product, and what decoding takes


class Count(NamedTuple):
    """What a part takes, forth and again with gradients: bytes of tensors at the most at a time, and of the gradients that are
    handed over; multiplications of matrices that are no weights (attention), and bytes that ops write."""

    most: int
    handed_over: int
    products: int
    written: int


def count_cost(gradients: Gradients, count: int, n_ctx: int) -> tuple[int, int, int, int, int]:
    """Bytes that a thread, or the device, needs to compute a part again with gradients, for a group of windows of n_ctx tokens,
    of which there are `count` in all; to compute some rows of the head; and of the gradients that it hands over at the end of
    either, at most; products and bytes written of all parts."""
    windows = np.zeros((min(count, gradients.windows_of_group(n_ctx)), n_ctx), np.int64)
    shapes, found, counts = ShapeGradients(gradients), dict[object, Count](), list[Count]()
    for part in gradients.parts:
        key = tuple((type(op), *(v.shape for v in op.outputs), *(w.shape for w in op.weights)) for op in part.ops)
        if key not in found:  # most layers are like others
            found[key] = shapes.count(part, windows)
        counts.append(found[key])
    most, handed_over, products, written = zip(*counts, strict=True)
    logits = HEAD_ROWS * gradients.graph.n_vocab
    own = max(most) + _TILE_BYTES, _LOGIT_BYTES * logits + _TILE_BYTES, max(4 * logits, *handed_over)
    return *own, sum(products), sum(written)


class CountedGradients(Gradients):
    """Counts what it takes."""

    def counted(self, part: GraphPart, group: WindowGroup) -> Count:
        """Of a part that is computed forth, and again with gradients. Tensors that are given do not count."""
        forth, back = _Counted(group), _Counted(group)
        with forth:
            self._forward(part, replace(group, values=dict(group.values)))
        with back:
            again = self._again(part, group, self.weights, {id(op) for op in self.reached if observed_weights(op)})
            handed_over = self._carry_back(part, group, again, [x for _, _, x, _ in again.made], False)
        nbytes = sum(grad.nbytes for grad in handed_over if grad is not None)
        return Count(max(forth.most, back.most), nbytes, forth.products + back.products, forth.written + back.written)


class ShapeGradients(CountedGradients):
    """The gradients of the same graph, of which only shapes are computed."""

    def __init__(self, like: Gradients):
        super().__init__(like.graph, cast(Weights, _ShapeWeights(like.weights)), _META)
        self.parts = like.parts
        self._values = {value.index: value for op in self.graph.ops for value in op.outputs}
        self._specs = {(spec.layer, spec.name): spec for spec in self.graph.cache if isinstance(spec, CacheSpec)}

    def count(self, part: GraphPart, windows: np.ndarray) -> Count:
        """As `counted`, of so many windows."""
        group, n = WindowGroup(windows), windows.size
        group.values = {index: _given(self._values[index], n) for index in part.reads}
        group.rows = [{key: self._rows(key, windows) for key in part.takes} for _ in windows]
        ends = {*part.makes, self.graph.hidden.index} & {value.index for op in part.ops for value in op.outputs}
        group.gradients = {index: torch.empty((n, *self._values[index].shape), device=_META) for index in ends}
        group.row_gradients = [{key: self._rows(key, windows) for key in part.gives} for _ in windows]
        return self.counted(part, group)

    def _rows(self, key: CacheKey, windows: np.ndarray) -> Tensor:
        spec = self._specs[key]
        return torch.empty((spec.heads, windows.shape[1] // spec.every, spec.width), device=_META)


def _given(value: Value, n: int) -> Result:
    x = torch.empty((n, *value.shape), device=_META)
    return (x.to(torch.int64), x) if isinstance(value, RoutingValue) else x


class _Counted(TorchDispatchMode):
    """Counts the bytes of all tensors that ops make within it. most: at the same time; written: in all; products: of matrices.
    given: whose tensors do not count."""

    def __init__(self, given: WindowGroup):
        super().__init__()
        self._now, self.most, self.written, self.products = 0, 0, 0, 0
        values = [x for value in given.values.values() for x in (value if isinstance(value, tuple) else [value])]
        rows = [x for own in (*given.rows, *given.row_gradients) for x in own.values()]
        self._known = {x.untyped_storage()._cdata: 0 for x in (*values, *rows, *given.gradients.values())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.products += result.numel() * args[0].shape[-1]
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.written += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._now -= self._known.pop(key)


class _ShapeWeights:
    """What the tensors of a source are multiplied with, and make, as shapes."""

    def __init__(self, weights: Weights):
        self.source = weights.source

    def matrix(self, weight: Weight, device: torch.device) -> Any:
        return _ShapeMatrix(weight)

    def vector(self, weight: Weight, device: torch.device) -> Tensor:
        return torch.empty(weight.shape[::-1], device=_META)


class _ShapeMatrix:
    """As `weights.Matrix`."""

    def __init__(self, weight: Weight):
        self._columns, self._rows, self._all_rows = weight.shape[0], weight.shape[1], prod(weight.shape[1:])

    def multiply(self, x: Tensor, prepared: Any = None) -> Tensor:
        return torch.empty((len(x), self._rows), device=_META)

    def multiply_experts(self, x: Tensor, experts: Tensor, prepared: Any = None) -> Tensor:
        return torch.empty((*experts.shape, self._rows), device=_META)

    def multiply_back(self, g: Tensor) -> Tensor:
        return torch.empty((len(g), self._columns), device=_META)

    def multiply_experts_back(self, g: Tensor, experts: Tensor) -> Tensor:
        return torch.empty((*experts.shape, self._columns), device=_META)

    def gather(self, ids: Tensor) -> Tensor:
        return torch.empty((*ids.shape, self._columns), device=_META)

    __getitem__ = gather

    def decoded(self) -> Tensor:
        return torch.empty((self._all_rows, self._columns), device=_META)
