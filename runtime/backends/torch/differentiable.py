"""What the functions of ops are given instead of packed weights and caches of inference, so that torch takes gradients of them:
products whose weights have no gradient, what layers keep as tensors, and latent attention in both of its forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...graph import Op, Value, Weight, ops
from ...graph.values import CacheSpec, StateSpec
from .device_pass import DevicePass, Result, joined
from .functions import PACKED, attention
from .weights import Matrix, Weights

CacheKey = tuple[int, str]  # layer, name


class _Product(torch.autograd.Function):
    """x [n, columns] times a packed matrix; the weights have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix) -> Tensor:
        ctx.matrix = matrix
        return matrix.multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.matrix.multiply_back(grads[0]), None


class _ExpertProduct(torch.autograd.Function):
    """x [n, columns] or [n, used, columns] times the packed matrices of each token's experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, matrix: Matrix) -> Tensor:
        ctx.matrix, ctx.experts, ctx.is_shared = matrix, experts, x.ndim == 2
        return matrix.multiply_experts(x, experts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = ctx.matrix.multiply_experts_back(grads[0], ctx.experts)
        return back.sum(dim=1) if ctx.is_shared else back, None, None


class DifferentiableMatrix:
    """A `Matrix` whose products have gradients of what they multiply. Tables and decoded rows have none."""

    def __init__(self, matrix: Matrix):
        self._matrix = matrix

    def multiply(self, x: Tensor, prepared: Any = None) -> Tensor:
        return _Product.apply(x, self._matrix)

    def multiply_experts(self, x: Tensor, experts: Tensor, prepared: Any = None) -> Tensor:
        return _ExpertProduct.apply(x, experts, self._matrix)

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self._matrix[ids]

    def gather(self, ids: Tensor) -> Tensor:
        return self._matrix.gather(ids)

    def decoded(self) -> Tensor:
        return self._matrix.decoded()


class GradientCache:
    """What layers keep of one window, which begins the sequence: rows as tensors in float32, and states of zeros.

    rows  (layer, name) -> [heads, rows, width]: those that other parts of the graph wrote, and what is written
    """

    length = 0

    def __init__(self, specs: Iterable[CacheSpec | StateSpec], device: torch.device, given: Mapping[CacheKey, Tensor]):
        self._specs = {(spec.layer, spec.name): spec for spec in specs}
        self._device, self.rows = device, dict(given)

    def write_all(self, layer: int, rows: Mapping[str, Tensor]) -> None:
        for name, own in rows.items():
            self.write(layer, name, own)

    def write(self, layer: int, name: str, rows: Tensor) -> None:
        """rows: [n, heads, width]; of runs of tokens that share one the last one's are kept."""
        spec = self._specs[layer, name]
        assert isinstance(spec, CacheSpec)
        self.rows[layer, name] = rows[spec.every - 1 :: spec.every].transpose(0, 1)

    def read(self, layer: int, name: str, start: int, stop: int) -> Tensor:
        return self.rows[layer, name][:, start:stop]

    read_rotated = read

    def rotation(self, layer: int, name: str) -> tuple[int, ...]:
        """Rows are as they were written."""
        return ()

    def state(self, layer: int, name: str) -> Tensor:
        spec = self._specs[layer, name]
        assert isinstance(spec, StateSpec)
        return torch.zeros(spec.shape, device=self._device)

    def write_state(self, layer: int, name: str, state: Tensor) -> None:
        """Nothing: no other pass follows."""

    def extend(self, layer: int, name: str, new: Tensor, first: int) -> Tensor:
        """As `DeviceCache.extend`."""
        kept = torch.cat([self.state(layer, name), new])
        return kept[len(kept) - len(new) + first :]


def latent_attention(step: DevicePass, op: ops.LatentAttention, values: Mapping[str, Any]) -> tuple[Tensor, dict[int, Tensor]]:
    """The mean of both forms of latent attention, of which the file has the matrices: that of kv_b, which makes each head's
    keys and values of latents, and that of k_b and v_b, which takes queries to latents and weighted sums of latents to values.

    values: what the op reads by the names of its fields, weights as `DifferentiableMatrix`. Returns [n, heads, v_width], and
    what each matrix made: 0 (kv_b) [n, heads, nope + v_width]; 1 (k_b) [n, heads, rank]; 2 (v_b) [n, heads, v_width]. Their
    gradients are those of the form alone divided by the number of forms.
    """
    q, latent, k_pe, selection = (values[name] for name in ("q", "latent", "k_pe", "selection"))
    heads, rank, nope = q.shape[1], latent.shape[1], op.nope
    to_keys, to_values = _to_keys(op, values, heads, rank), _to_values(op, values, heads, rank)
    made: dict[int, Tensor] = {}
    if op.kv_b is not None:
        both = torch.cat([to_keys, to_values], dim=1)
        made[0] = torch.einsum("nr,hkr->nhk", latent, both)
    if op.k_b is not None and op.v_b is not None:
        made[1] = torch.einsum("nhk,hkr->nhr", q[..., :nope], to_keys)
    made = {number: x if x.requires_grad else x.requires_grad_() for number, x in made.items()}
    forms: list[Tensor] = []
    if 0 in made:
        results: list[Tensor] = []
        for (_, rows), queries, own, shared in zip(step.segments, *map(step.split, (q, made[0], k_pe)), strict=True):
            to_key, value = own.split([nope, op.v_width], dim=2)
            keys = torch.cat([to_key, shared[:, None].expand(-1, heads, -1)], dim=2).transpose(0, 1)
            results.append(attention.attend(step, queries, keys, value.transpose(0, 1), _latent_sight(op, selection, rows)))
        forms.append(joined(results))
    if 1 in made:
        made[2] = torch.einsum("nhr,hvr->nhv", _latent_sums(step, op, values, made[1]), to_values)
        forms.append(made[2])
    return (forms[0] if len(forms) == 1 else (forms[0] + forms[1]) / 2), made


def latent_sums(step: DevicePass, op: ops.LatentAttention, values: Mapping[str, Any]) -> Tensor:
    """What v_b multiplies: each head's weighted sums of latents, [n, heads, rank]. values: as for `latent_attention`,
    v_b is not read."""
    q, latent = values["q"], values["latent"]
    to_keys = _to_keys(op, values, q.shape[1], latent.shape[1])
    return _latent_sums(step, op, values, torch.einsum("nhk,hkr->nhr", q[..., : op.nope], to_keys))


def _latent_sums(step: DevicePass, op: ops.LatentAttention, values: Mapping[str, Any], taken: Tensor) -> Tensor:
    """taken: the queries as they are taken to latents, [n, heads, rank]."""
    q, latent, k_pe, selection = (values[name] for name in ("q", "latent", "k_pe", "selection"))
    sums: list[Tensor] = []
    rotated = q[..., op.nope :]
    parts = zip(step.segments, *map(step.split, (taken, rotated, latent, k_pe)), strict=True)
    for (_, rows), absorbed, turned, own, shared in parts:
        queries, keys = torch.cat([absorbed, turned], dim=2), torch.cat([own, shared], dim=1)[None]
        sums.append(attention.attend(step, queries, keys, keys[..., : latent.shape[1]], _latent_sight(op, selection, rows)))
    return joined(sums)


def _latent_sight(op: ops.LatentAttention, selection: Tensor | None, rows: slice) -> attention.Sight:
    return attention.Sight(op.scale, allowed=None if selection is None else attention.seen_keys(selection[rows]))


def operand_value(op: Op, name: str, values: Mapping[int, Result], weights: Weights, device: torch.device) -> Any:
    """What a function gets for a field of its op: a value, a weight, or what the field says. values: by index."""
    given = getattr(op, name)
    if isinstance(given, Value) and name != "out":
        return values[given.index]
    if isinstance(given, Weight):
        if name in PACKED[type(op)]:
            matrix = weights.matrix(given, device)
            return matrix if isinstance(matrix, DifferentiableMatrix) else DifferentiableMatrix(matrix)
        return weights.vector(given, device)
    return given


def _to_keys(op: ops.LatentAttention, values: Mapping[str, Any], heads: int, rank: int) -> Tensor:
    """K [heads, nope, rank]."""
    if op.kv_b is not None:
        return values["kv_b"].decoded().view(heads, op.nope + op.v_width, rank)[:, : op.nope]
    return values["k_b"].decoded().view(heads, rank, op.nope).transpose(1, 2)


def _to_values(op: ops.LatentAttention, values: Mapping[str, Any], heads: int, rank: int) -> Tensor:
    """V [heads, v_width, rank]."""
    if op.kv_b is not None:
        return values["kv_b"].decoded().view(heads, op.nope + op.v_width, rank)[:, op.nope :]
    return values["v_b"].decoded().view(heads, op.v_width, rank)
