"""A run of ops that the cpu backend computes: a graph of its own, whose inputs come from devices and whose results go there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....quantize.torch_encoders.decoder import decoder_of
from ...graph import Graph, Observer, Op, Value, ops
from ...graph.observer import ObserverGroup
from ...settings import Settings
from ..cpu import executable as cpu
from ..cpu.weights import WeightMatrix, WeightStore
from .device_pass import DevicePass, Result, to_numpy

if TYPE_CHECKING:
    from ..cpu.kv_cache import KVCache


class HostSegment:
    """Ops in the order of a graph, as a graph for the cpu backend.

    layers   whose state the ops keep, in caches of the cpu backend
    inputs   values that come from other ops, as the columns of one `HiddenInput`
    outputs  values that other ops read
    next_device  where the ops behind are; None: nowhere
    """

    next_device: torch.device | None = None

    def __init__(self, graph: Graph, members: Sequence[Op], wanted: Collection[int], store: WeightStore, settings: Settings):
        """wanted: indexes of the values that are read outside."""
        made = {value.index for op in members for value in op.outputs}
        read = {value.index: value for op in members for value in op.inputs if value.index not in made}
        self.members, self.inputs = tuple(members), tuple(read.values())
        self.outputs = tuple(value for op in members for value in op.outputs if value.index in wanted)
        self.layers = {layer for layer in map(state_layer, members) if layer is not None}
        self._next = 1 + max(value.index for op in (*graph.ops, *graph.head) for value in op.outputs)
        self._helpers: set[Op] = set()
        self._table = _only_table(self.members, store)
        before, (after, hidden) = self._entry(), self._exit()
        cache = tuple(spec for spec in graph.cache if spec.layer in self.layers)
        inner = replace(graph, ops=(*before, *members, *after), head=(), hidden=hidden, logits=None, layers=(), cache=cache)
        has_experts = any(isinstance(op, ops.Route) for op in members)
        reduction = settings.expert_reduction if has_experts else None
        self.executable = cpu.compile_graph(inner, store, replace(settings, expert_reduction=reduction))

    def _value(self, *shape: int) -> Value:
        self._next += 1
        return Value(self._next - 1, shape)

    def _help(self, op: Op) -> Op:
        self._helpers.add(op)
        return op

    def _entry(self) -> list[Op]:
        """Ops that make the inputs of one matrix."""
        if not self.inputs:
            return []
        sizes = tuple(prod(value.shape) for value in self.inputs)
        rows = [self._value(size) if len(v.shape) > 1 else v for v, size in zip(self.inputs, sizes, strict=True)]
        out: list[Op] = []
        if len(rows) == 1:
            out.append(self._help(ops.HiddenInput(rows[0])))
        else:
            whole = self._value(sum(sizes))
            out += [self._help(ops.HiddenInput(whole)), self._help(ops.Split(rows[0], whole, sizes, tuple(rows[1:])))]
        shaped = zip(self.inputs, rows, strict=True)
        return out + [self._help(ops.Reshape(value, row)) for value, row in shaped if row is not value]

    def _exit(self) -> tuple[list[Op], Value]:
        """Ops that make one matrix of the outputs, and this matrix."""
        out: list[Op] = []
        whole: Value | None = None
        for value in self.outputs:
            row = value
            if len(value.shape) > 1:
                row = self._value(prod(value.shape))
                out.append(self._help(ops.Reshape(row, value)))
            if whole is not None:
                both = self._value(whole.shape[0] + row.shape[0])
                out.append(self._help(ops.Concat(both, whole, row)))
                row = both
            whole = row
        assert whole is not None
        return out, whole

    def observe(self, observer: Observer | None) -> None:
        self.executable.observer = None if observer is None else _OfMembers(observer, self._helpers)

    def new_cache(self, limit: int) -> KVCache:
        return self.executable.new_cache(limit)

    def run(self, step: DevicePass, number: int, values: dict[int, Result]) -> dict[int, Tensor]:
        """Values by index -> outputs by index. number: of this segment, and of its caches within those of sequences."""
        n = len(step.tokens)
        caches = [(cache.hosts[number], rows.stop - rows.start) for cache, rows in step.segments]
        if self._table is not None and self.executable.observer is None:
            table, op = self._table
            for cache, count in caches:
                cache.commit(count)
            rows = self._looked_up(table, step)
            return {op.out.index: rows if op.scale == 1 else rows * op.scale}
        inputs = [to_numpy(_tensor(values[value.index])).reshape(n, -1) for value in self.inputs]
        rows = np.concatenate(inputs, axis=1) if inputs else None
        whole = torch.from_numpy(self.executable.hidden(step.tokens, caches or [(self.new_cache(n), n)], rows, True))
        parts = torch.split(whole, [prod(value.shape) for value in self.outputs], dim=1)
        return {value.index: part.reshape(n, *value.shape) for value, part in zip(self.outputs, parts, strict=True)}

    def _looked_up(self, table: WeightMatrix, step: DevicePass) -> Tensor:
        """The rows of a pass's tokens; many are decoded by the device that reads them."""
        stored, bytes_of_rows = table.tensor.stored, table.tensor.mapped
        on_device = not step.is_small and self.next_device is not None and self.next_device.type != "cpu"
        if not on_device or stored is None or stored.rows != 1 or table.tensor.scale is not None or bytes_of_rows is None:
            return torch.from_numpy(np.ascontiguousarray(table.lookup(step.tokens)))
        rows = torch.from_numpy(bytes_of_rows[step.tokens]).to(self.next_device)
        return decoder_of(stored.name, self.next_device)(rows, table.columns)


class _OfMembers(ObserverGroup):
    """An observer that is not asked about ops which are not the model's."""

    def __init__(self, observer: Observer, helpers: Collection[Op]):
        super().__init__([observer])
        self._helpers = helpers

    def wants_input(self, op: Op) -> bool:
        return op not in self._helpers and super().wants_input(op)

    def wants_output(self, op: Op) -> bool:
        return op not in self._helpers and super().wants_output(op)


def _only_table(members: Sequence[Op], store: WeightStore) -> tuple[WeightMatrix, ops.Embedding] | None:
    """The table that tokens are looked up in and its op, where a segment has no other ops."""
    op = members[0]
    if len(members) > 1 or not isinstance(op, ops.Embedding) or op.by != "token":
        return None
    return store.matrix(op.table.name, *op.table.shape), op


def state_layer(op: Op) -> int | None:
    """The layer of whose state (what it keeps of a sequence) an op reads or writes a part; None: of none."""
    return getattr(op, "layer", None)


def _tensor(value: Result) -> Tensor:
    assert isinstance(value, Tensor)
    return value
