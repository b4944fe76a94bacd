"""The activations of a model beside those of the same model while its matrices are replaced, one after the other.

Two streams of all windows go through the graph at the same time, op by op: one with the original weights, one with those that
replace them. Where the inputs of a matrix that is to be replaced are known in both, the pass stops and hands them over; when it
goes on, the matrix has been replaced. So each matrix is made for the inputs that it is going to have, and every op is computed
once in each stream. What later ops read is kept in memory or in temporary files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....data_classes import dataclass
from ....operating_system.files import reserve_space
from ....operating_system.memory import trim_free_memory
from ....quantize.covariance.drift import DriftSums
from ...graph import Graph, Observer, Op, ops
from ...graph.values import RoutingValue, Weight
from .device_pass import DevicePass, Result
from .differentiable import GradientCache, latent_attention, latent_sums, operand_value
from .functions import FUNCTIONS
from .gradients import GROUP_TOKENS, SCRATCH
from .stream_steps import MatrixInput, StreamStep, last_uses, steps_of
from .weights import Weights

_STRIP = 512  # columns of the sums that one thread makes


class TwoStreams:
    """Runs windows through a graph twice, with the original weights and with those that replace them.

    graph      of both
    original, changed  its tensors, for products in float32; those of `inputs` are read when they have been replaced
    windows    int64 [n, n_ctx], each from scratch
    inputs     of the weights that are replaced, of `matrix_inputs`
    threads    on the processor: groups of windows that are computed at a time, with the same bits for any number
    folder     where values are kept in temporary files; None: in memory
    copied_bytes  what weights may take that had to be copied from their file to memory; more are read again for each step
    """

    def __init__(
        self,
        graph: Graph,
        original: Weights,
        changed: Weights,
        windows: np.ndarray,
        inputs: Mapping[str, MatrixInput],
        *,
        device: torch.device | str = "cpu",
        threads: int = 1,
        folder: Path | None = None,
        copied_bytes: int = 4 << 30,
    ):
        self.graph, self.windows, self.device, self.threads = graph, windows, torch.device(device), threads
        self._folder, self._copied_bytes = folder, copied_bytes
        self._streams = tuple(_Stream(graph, weights, windows, self.device) for weights in (original, changed))
        self.steps = steps_of(graph, inputs)
        size = max(1, GROUP_TOKENS // windows.shape[1])
        self._groups = [range(first, min(first + size, len(windows))) for first in range(0, len(windows), size)]
        self._last_use = last_uses(graph)

    def run(
        self,
        on_input: Callable[[MatrixInput, KnownInput], None],
        on_windows: Callable[[StreamStep, int], None] = lambda step, windows: None,
    ) -> None:
        """Runs all steps. on_input: gets each input as soon as it is known, and returns when all weights that are multiplied
        with it are replaced; on_windows: called with each step, and how many windows of both streams have come through it."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for step in self.steps:
                    self._compute(pool, step, partial(on_windows, step))
                    trim_free_memory()  # what threads had of values lies between what is kept: 60 MiB a layer of the demo
                    for one in step.inputs:
                        on_input(one, KnownInput(self, pool, one))
                    trim_free_memory()
        finally:
            torch.set_num_threads(before)

    def _compute(self, pool: ThreadPoolExecutor, step: StreamStep, on_windows: Callable[[int], None]) -> None:
        all_ops = (*self.graph.ops, *self.graph.head)
        layers = {op.layer for op in all_ops[step.stop :] if hasattr(op, "layer")}  # type: ignore[attr-defined]
        sums = [one for one in step.inputs if one.kind == "sums"]
        kept = [value for op in step.ops for value in op.outputs if self._last_use.get(value.index, -1) >= step.stop]
        done = 0
        for stream in self._streams:
            for value in kept:
                self._allocate(stream, value.index, value.shape, isinstance(value, RoutingValue))
            for one in sums:
                self._allocate(stream, -1 - one.index, (one.op.q.shape[0], one.columns), False)  # type: ignore[attr-defined]
            stream.weights.release(self._copied_bytes)
            with stream.weights.visit():
                compute = partial(stream.compute, step.ops, sums, [value.index for value in kept])
                for group, _ in zip(self._groups, pool.map(compute, self._groups), strict=True):
                    done += len(group)
                    on_windows(done)
            new = {-1 - one.index for one in sums}
            stream.forget(lambda i, new=new: i not in new and self._last_use.get(i, -1) < step.stop, layers)

    def _allocate(self, stream: _Stream, index: int, shape: tuple[int, ...], is_routing: bool) -> None:
        shape = (self.windows.size, *shape)
        dtypes = (torch.int64, torch.float32) if is_routing else (torch.float32,)
        stream.values[index] = tuple(_allocated(shape, dtype, self._folder) for dtype in dtypes)

    def rows(self, one: MatrixInput, window: int, matrix: int) -> tuple[Tensor, Tensor]:
        """(x, z): what a matrix is multiplied with in one window, by both streams, of the same tokens: [tokens, columns]."""
        n_ctx = self.windows.shape[1]
        at = slice(window * n_ctx, window * n_ctx + n_ctx)
        if one.kind == "experts":
            tokens, hits = self._sent(one, at, matrix)
            x, z = (
                stream.values[one.index][0][at][tokens, hit[tokens].int().argmax(dim=1)].to(self.device)
                for stream, hit in zip(self._streams, hits, strict=True)
            )
            return x, z
        index = -1 - one.index if one.kind == "sums" else one.index
        found = [stream.values[index][0][at].to(self.device) for stream in self._streams]
        if one.kind in ("heads", "sums"):
            found = [x[..., : one.columns] for x in found]
            found = [x[:, matrix] for x in found] if one.matrices > 1 else found
        return found[0].reshape(-1, one.columns), found[1].reshape(-1, one.columns)

    def add_up(self, one: MatrixInput, matrix: int, windows: range, columns: slice, sums: _Sums) -> int:
        """Puts some columns of the sums over windows into all of `sums`; returns the tokens."""
        made = [torch.zeros_like(part[:, columns], device=self.device) for part in sums.parts]
        tokens = 0
        for window in windows:
            x, z = self.rows(one, window, matrix)
            some = z[:, columns]
            made[0] += z.T @ some
            made[1] += (x - z).T @ some
            for missed, weight in zip(made[2:], sums.misses, strict=True):
                missed += self._missed(one, one.streams[weight], window, matrix).T @ some
            tokens += len(z)
        for all_columns, some in zip(sums.parts, made, strict=True):
            all_columns[:, columns] = some.cpu()
        return tokens

    def _sent(self, one: MatrixInput, at: slice, matrix: int) -> tuple[Tensor, list[Tensor]]:
        """Of some tokens those that both streams send to an expert, and whether either's choices are that expert."""
        hits = [stream.values[one.op.routing.index][0][at] == matrix for stream in self._streams]  # type: ignore[attr-defined]
        return torch.nonzero(hits[0].any(dim=1) & hits[1].any(dim=1))[:, 0], hits

    def _missed(self, one: MatrixInput, stream: Sequence[int], window: int, matrix: int) -> Tensor:
        """What of some values the original has more, for each row of z: [tokens, width]. Of experts as much as all of a token's
        have to make, for their weighted sum to be that."""
        n_ctx = self.windows.shape[1]
        at = slice(window * n_ctx, window * n_ctx + n_ctx)
        tokens = self._sent(one, at, matrix)[0] if one.kind == "experts" else slice(None)
        original, changed = (each.values for each in self._streams)
        parts = [(original[index][0][at][tokens] - changed[index][0][at][tokens]).flatten(1) for index in stream]
        missed = torch.stack(parts).sum(dim=0)
        if one.kind == "experts":
            total = changed[one.op.routing.index][1][at][tokens].sum(dim=1, keepdim=True)  # type: ignore[attr-defined]
            missed = torch.where(total > 0, missed / total, 0)
        return missed.to(self.device)


@dataclass(frozen=True)
class _Sums:
    """Sums over a half of the windows: z z^T, (x - z) z^T; and by weight what its stream misses, times z^T."""

    squares: Tensor
    drifts: Tensor
    misses: dict[Weight, Tensor]

    @property
    def parts(self) -> list[Tensor]:
        return [self.squares, self.drifts, *self.misses.values()]

    @classmethod
    def allocated(cls, columns: int, weights: Iterable[Weight], folder: Path | None) -> _Sums:
        squares, drifts = (_allocated((columns, columns), torch.float32, folder) for _ in range(2))
        misses = {weight: _allocated((weight.shape[1], columns), torch.float32, folder) for weight in weights}
        return cls(squares, drifts, misses)

    def over(self, tokens: int) -> DriftSums:
        misses = {weight.name: missed.numpy() for weight, missed in self.misses.items()}
        return DriftSums(self.squares.numpy(), self.drifts.numpy(), tokens, misses)


class KnownInput:
    """What is known of an input when it is handed over, until its weights are replaced."""

    def __init__(self, streams: TwoStreams, pool: ThreadPoolExecutor, one: MatrixInput):
        self._streams, self._pool, self._one = streams, pool, one

    def halves(self, matrix: int, folder: Path | None = None) -> tuple[DriftSums, DriftSums]:
        """The sums of one matrix over the windows of even and of odd numbers, computed anew. Threads may ask at the same time.

        folder: where they are kept in temporary files; None: in memory
        """
        one, count = self._one, len(self._streams.windows)
        each = self._pool.map if one.matrices == 1 else map
        torch.set_num_threads(1)  # of this thread
        halves = [_Sums.allocated(one.columns, one.streams, folder) for _ in range(2)]
        strips = [slice(first, min(first + _STRIP, one.columns)) for first in range(0, one.columns, _STRIP)]
        tasks = [(half, strip) for half in range(2) for strip in strips]
        made = each(lambda task: self._streams.add_up(one, matrix, range(task[0], count, 2), task[1], halves[task[0]]), tasks)
        tokens = list(made)[:: len(strips)]
        for half in halves:
            _make_symmetric(half.squares)
        first, second = (half.over(seen) for half, seen in zip(halves, tokens, strict=True))
        return first, second


def _make_symmetric(matrix: Tensor) -> None:
    """The product of a matrix with itself is symmetric but for its rounding: in place of both entries their mean."""
    tiles = [slice(first, first + _STRIP) for first in range(0, len(matrix), _STRIP)]
    for number, a in enumerate(tiles):
        for b in tiles[number:]:
            mean = (matrix[a, b] + matrix[b, a].T) / 2
            matrix[a, b], matrix[b, a] = mean, mean.T


class _Stream:
    """One of both streams. values: by index, of all tokens, in the machine's memory, of a routing experts and their weights;
    at -1 - index of queries the sums of latents."""

    def __init__(self, graph: Graph, weights: Weights, windows: np.ndarray, device: torch.device):
        self.graph, self.weights, self.windows, self.device = graph, weights, windows, device
        self.values: dict[int, tuple[Tensor, ...]] = {}
        self._caches = [GradientCache(graph.cache, device, {}) for _ in windows]

    def compute(self, run: Sequence[Op], sums: Sequence[MatrixInput], kept: Sequence[int], group: range) -> None:
        """Computes ops for some windows, and keeps these values and sums."""
        windows, n_ctx = self.windows[group.start : group.stop], self.windows.shape[1]
        at = slice(group.start * n_ctx, group.stop * n_ctx)
        caches = [(self._caches[window], n_ctx) for window in group]
        step = DevicePass(windows.reshape(-1), caches, Observer(), scratch=SCRATCH)  # type: ignore[arg-type]
        step.device = self.device
        values: dict[int, Result] = {}

        def given(index: int) -> None:
            if index not in values:
                parts = [part[at].to(self.device) for part in self.values[index]]
                values[index] = parts[0] if len(parts) == 1 else tuple(parts)

        with torch.no_grad():
            for op in run:
                for value in op.inputs:
                    given(value.index)
                self._run(op, step, values)
            for one in sums:
                for value in one.op.inputs:
                    given(value.index)
                arguments = self._arguments(replace(one.op, v_b=None), step, values)  # type: ignore[call-arg]
                self._keep(-1 - one.index, latent_sums(step, one.op, arguments), at)  # type: ignore[arg-type]
        for index in kept:
            self._keep(index, values[index], at)

    def _arguments(self, op: Op, step: DevicePass, values: dict[int, Result]) -> dict[str, Any]:
        names = [name for name in FUNCTIONS[type(op)][1] if name != "out"]
        return {name: operand_value(op, name, values, self.weights, step.device) for name in names}

    def _run(self, op: Op, step: DevicePass, values: dict[int, Result]) -> None:
        function, names = FUNCTIONS[type(op)]
        if isinstance(op, ops.LatentAttention):
            # Of both forms that of kv_b, where the file has it: a prompt is computed so.
            form = op if op.kv_b is None else replace(op, k_b=None, v_b=None)
            result: Any = latent_attention(step, form, self._arguments(form, step, values))[0]
        else:
            result = function(step, **{name: operand_value(op, name, values, self.weights, step.device) for name in names})
        results = result if isinstance(op, ops.Split) else [result]
        values.update(zip((out.index for out in op.outputs), results, strict=True))

    def _keep(self, index: int, value: Result, at: slice) -> None:
        for kept, part in zip(self.values[index], value if isinstance(value, tuple) else (value,), strict=True):
            kept[at] = part

    def forget(self, is_over: Callable[[int], bool], layers: Collection[int]) -> None:
        """Forgets values, and rows in caches but those of these layers."""
        for index in [index for index in self.values if is_over(index)]:
            del self.values[index]
        for cache in self._caches:
            cache.rows = {key: rows for key, rows in cache.rows.items() if key[0] in layers}


def _allocated(shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Memory, or that of a temporary file without a name, which the system writes out as it needs to."""
    if folder is None:
        return torch.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve_space(file.fileno(), prod(shape) * dtype.itemsize)
        return torch.from_numpy(np.memmap(file, str(dtype).removeprefix("torch."), "w+", shape=shape))
