"""Weights whose continuous numbers are free while codes stay: gains and biases of norms, scales of blocks, in the bytes of
their file, and what products tell of the gradients of these numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....formats import TensorSource, dims
from ....formats.layouts.block_scales import BlockScale, block_scales
from ...graph import Graph, Weight, ops
from ...graph.gradients import reached_ops
from .decode import PackedMatrix
from .differentiable import DifferentiableMatrix
from .weights import Matrix, Weights

_TILE_ROWS = 512  # of a matrix whose gradient exists at a time


class TunedMatrix:
    """The scales of one tensor's blocks. changes: float32 [scales, rows of all matrices, blocks], what they are multiplied with
    is 1 + that; q: uint8 [rows, row_bytes], the rows with the scales as they are now, rounded to what the type stores."""

    def __init__(self, type_name: str, shape: tuple[int, ...], q: np.ndarray):
        self.type, self.shape, (self.columns, self.rows, self.matrices) = type_name, shape, dims(shape)
        self.q = np.array(q)
        self._scales = block_scales(type_name)
        self._given = [np.array(scale.of(self.q, self.columns), np.float32) for scale in self._scales]
        self.changes = np.zeros((len(self._scales), *self._given[0].shape), np.float32)
        # What the first scale alone makes of the codes, where there are others.
        self._first_only = np.array(self.q) if len(self._scales) > 1 else None
        self.packed = self._packed(self.q)
        self._first = self.packed if self._first_only is None else self._packed(self._first_only)
        self.apply()

    @property
    def given(self) -> np.ndarray:
        """float32, as `changes`: the scales that these are relative to."""
        return np.stack(self._given)

    @given.setter
    def given(self, scales: np.ndarray) -> None:
        self._given = list(scales)

    def _packed(self, q: np.ndarray) -> PackedMatrix:
        return PackedMatrix(self.type, self.columns, self.rows, self.matrices, torch.from_numpy(q.reshape(-1)))

    def apply(self) -> None:
        """Brings the changes into the rows."""
        for scale, given, change in zip(self._scales, self._given, self.changes, strict=True):
            scale.of(self.q, self.columns)[...] = _stored(scale, given * (1 + change))
        if self._first_only is not None:
            self._first_only[...] = self.q
            for scale in self._scales[1:]:
                scale.of(self._first_only, self.columns)[...] = 0

    def gradients(self, gradient_of: Any, matrix: int, out: Tensor) -> None:
        """Adds the gradients of `changes` to `out`, of one matrix. gradient_of: (start, stop) -> float32 [rows, columns], that
        of some of its rows."""
        for start in range(0, self.rows, _TILE_ROWS):
            stop = min(start + _TILE_ROWS, self.rows)
            at = slice(matrix * self.rows + start, matrix * self.rows + stop)
            gradient, weights = gradient_of(start, stop), self.packed.rows(start, stop, matrix)
            first = weights if self._first_only is None else self._first.rows(start, stop, matrix)
            parts = [first] if len(out) == 1 else [first, weights - first]
            for number, part in enumerate(parts):
                sums = (gradient.cpu() * part).view(stop - start, out.shape[2], -1).sum(dim=2)
                out[number, at] += sums / (1 + torch.from_numpy(self.changes[number, at]))


def _stored(scale: BlockScale, numbers: np.ndarray) -> np.ndarray:
    most = np.finfo(scale.dtype).max
    return np.clip(numbers, -most, most).astype(scale.dtype)


class TunableWeights(Weights):
    """The tensors of a quantised GGUF, in float32, some of which are tuned; these lie in the machine's memory.

    matrices  name -> its scales
    vectors   name -> float32, what the file's numbers are multiplied with is 1 + that
    """

    def __init__(self, source: TensorSource, graph: Graph, *, scales: bool):
        """scales: whether those of matrices are tuned, beside norms."""
        super().__init__(source, {}, exact=True)
        self.matrices: dict[str, TunedMatrix] = {}
        self.vectors: dict[str, np.ndarray] = {}
        self._given: dict[str, np.ndarray] = {}
        reached = reached_ops(graph)
        for name in _norms(reached):
            tensor = source.tensors[name]
            if tensor.stored is not None and tensor.stored.name == "f32":
                self._given[name] = np.array(tensor.read(0, tensor.n_rows), np.float32)
                self.vectors[name] = np.zeros_like(self._given[name])
        for name in _products(reached) if scales else ():
            tensor = source.tensors[name]
            if tensor.stored is not None and tensor.raw is not None and block_scales(tensor.stored.name):
                tuned = self.matrices[name] = TunedMatrix(tensor.stored.name, tensor.shape, tensor.raw(0, tensor.n_rows))
                self._stored[name] = tuned.packed
        self.apply()

    @property
    def changes(self) -> dict[str, np.ndarray]:
        """Name -> what is tuned, of vectors and matrices."""
        return {**self.vectors, **{name: tuned.changes for name, tuned in self.matrices.items()}}

    @property
    def given(self) -> dict[str, np.ndarray]:
        """Name -> the numbers that changes are relative to."""
        return {**self._given, **{name: tuned.given for name, tuned in self.matrices.items()}}

    def take_given(self, numbers: Mapping[str, np.ndarray]) -> None:
        """Takes these for the numbers that changes are relative to, whatever the file has now."""
        for name, x in numbers.items():
            if name in self.matrices:
                self.matrices[name].given = x
            else:
                self._given[name] = x
        self.apply()

    def rows(self, name: str) -> np.ndarray:
        """uint8 [rows, row_bytes], a tuned tensor as it is now."""
        if name in self.matrices:
            return self.matrices[name].q
        numbers = self.numbers(name).astype("<f4")
        return numbers.reshape(-1, numbers.shape[-1]).view(np.uint8)

    @property
    def nbytes(self) -> int:
        """Of memory: what is tuned, as given, its moments, gradients and best state, and copies of the matrices."""
        copies = sum(tuned.q.nbytes * (2 if len(tuned.changes) > 1 else 1) for tuned in self.matrices.values())
        return 6 * 4 * sum(x.size for x in self.changes.values()) + copies

    def apply(self) -> None:
        """Brings changes into the tensors that products use."""
        for tuned in self.matrices.values():
            tuned.apply()
        self._vectors.clear()

    def numbers(self, name: str) -> np.ndarray:
        """float32, a tuned vector as it is now."""
        return self._given[name] * (1 + self.vectors[name])

    def vector(self, weight: Weight, device: torch.device) -> Tensor:
        if weight.name not in self.vectors:
            return super().vector(weight, device)
        return torch.from_numpy(self.numbers(weight.name).reshape(weight.shape[::-1])).to(device)

    def release(self, most: int) -> None:
        """Nothing: what is tuned stays."""


class WithLeaves:
    """`TunableWeights` in one pass, in which what is tuned has leaves: name -> float32 zeros, which are added to `changes`."""

    def __init__(self, weights: TunableWeights):
        self._weights = weights
        self.leaves: dict[str, Tensor] = {}

    def vector(self, weight: Weight, device: torch.device) -> Tensor:
        numbers = self._weights.vector(weight, device)
        changes = self._weights.vectors.get(weight.name)
        if changes is None:
            return numbers
        if weight.name not in self.leaves:
            self.leaves[weight.name] = torch.zeros(changes.shape).requires_grad_()
        relative = self.leaves[weight.name] / (1 + torch.from_numpy(changes))
        return numbers * (1 + relative.reshape(numbers.shape).to(device))

    def matrix(self, weight: Weight, device: torch.device) -> Matrix | TunedProduct:
        matrix, tuned = self._weights.matrix(weight, device), self._weights.matrices.get(weight.name)
        if tuned is None:
            return matrix
        if weight.name not in self.leaves:
            self.leaves[weight.name] = torch.zeros(tuned.changes.shape).requires_grad_()
        return TunedProduct(matrix, tuned, self.leaves[weight.name])


class _Product(torch.autograd.Function):
    """As that of `differentiable`, with gradients of the scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, matrix: Matrix, tuned: TunedMatrix) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix, ctx.tuned, ctx.shape = matrix, tuned, leaf.shape
        return matrix.multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), g, out = ctx.saved_tensors, grads[0], torch.zeros(ctx.shape)
        ctx.tuned.gradients(lambda start, stop: g[:, start:stop].T @ x, 0, out)
        return ctx.matrix.multiply_back(g), out, None, None


class _ExpertProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, experts: Tensor, matrix: Matrix, tuned: TunedMatrix) -> Tensor:
        ctx.save_for_backward(x, experts)
        ctx.matrix, ctx.tuned, ctx.shape = matrix, tuned, leaf.shape
        return matrix.multiply_experts(x, experts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, experts), g, out = ctx.saved_tensors, grads[0], torch.zeros(ctx.shape)
        back = ctx.matrix.multiply_experts_back(g, experts)
        is_shared = x.ndim == 2
        inputs = (x[:, None].expand(-1, experts.shape[1], -1) if is_shared else x).reshape(-1, x.shape[-1])
        flat, numbers = g.reshape(-1, g.shape[-1]), experts.reshape(-1)
        for matrix in torch.unique(numbers).tolist():
            tokens = torch.nonzero(numbers == matrix)[:, 0]
            rows, own = flat[tokens], inputs[tokens]
            ctx.tuned.gradients(lambda start, stop, rows=rows, own=own: rows[:, start:stop].T @ own, matrix, out)
        return (back.sum(dim=1) if is_shared else back), out, None, None, None


class _Decoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, matrix: Matrix, tuned: TunedMatrix) -> Tensor:
        ctx.tuned, ctx.shape = tuned, leaf.shape
        return matrix.decoded()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out, rows = torch.zeros(ctx.shape), ctx.tuned.rows
        for matrix in range(ctx.tuned.matrices):
            own = grads[0][matrix * rows : (matrix + 1) * rows]
            ctx.tuned.gradients(lambda start, stop, own=own: own[start:stop], matrix, out)
        return out, None, None


class TunedProduct(DifferentiableMatrix):
    """A matrix whose products have gradients of what they multiply, and of its scales. Rows of tables have none."""

    def __init__(self, matrix: Matrix, tuned: TunedMatrix, leaf: Tensor):
        super().__init__(matrix)
        self._tuned, self._leaf = tuned, leaf

    def multiply(self, x: Tensor, prepared: Any = None) -> Tensor:
        return _Product.apply(x, self._leaf, self._matrix, self._tuned)

    def multiply_experts(self, x: Tensor, experts: Tensor, prepared: Any = None) -> Tensor:
        return _ExpertProduct.apply(x, self._leaf, experts, self._matrix, self._tuned)

    def decoded(self) -> Tensor:
        return _Decoded.apply(self._leaf, self._matrix, self._tuned)


def _norms(reached: Iterable[Any]) -> list[str]:
    """Gains and biases of norms."""
    weights = (weight for op in reached if isinstance(op, ops.Norm) for weight in (op.weight, op.bias))
    return list(dict.fromkeys(weight.name for weight in weights if weight is not None))


def _products(reached: Iterable[Any]) -> list[str]:
    """Matrices of products; of latent attention those of the form that prompts are computed in."""
    found: list[Weight | None] = []
    for op in reached:
        if isinstance(op, ops.LatentAttention):
            found += [op.kv_b] if op.kv_b is not None else [op.k_b, op.v_b]
        elif isinstance(op, ops.Linear | ops.ExpertLinear):
            found += op.weights[:1]
    return list(dict.fromkeys(weight.name for weight in found if weight is not None))
