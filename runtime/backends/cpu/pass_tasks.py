"""The tasks of a pass: kernels with their operands, and functions of Python, in an order in which they could run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....formats import TYPES
from ...graph import Value
from .compiled_graph import CompiledGraph
from .kernels import cache_blocks, hadamard, row_kernels
from .kernels.attention.cache_rows import TYPE_IDS
from .kernels.task_kernel import OperandKernel
from .kv_cache import KVCache
from .memory import Partition, View, dense
from .pass_memory import PassMemory
from .schedule import Schedule

CELL = 1024  # columns of a part where rows are divided: a multiple of all blocks
_ROW_NUMBERS = 16384  # numbers of the rows of one part: several microseconds

Batch = list[tuple[KVCache, slice]]  # the cache of each sequence, and the rows that are its tokens


@dataclass
class RunInputs:
    """The inputs of the current run of a pass, which its functions read."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    batch: Batch = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    inputs: np.ndarray | None = None


class PassTasks(PassMemory):
    """Collects the tasks of a pass.

    counts  tokens of each sequence
    names   of the rows of the caches
    gemv    whether its kernels are those for generated tokens (see PassProgram)
    """

    gemv = False

    def __init__(self, compiled: CompiledGraph, counts: tuple[int, ...], names: tuple[str, ...]):
        super().__init__(sum(counts), compiled.last_use)
        self.compiled, self.counts, self.names = compiled, counts, names
        self.settings, self.workers, self.threads = compiled.settings, compiled.workers, compiled.workers.count
        self.row_step = max(1, _ROW_NUMBERS // compiled.graph.n_embd)
        self.schedule, self.run_inputs = Schedule(), RunInputs()
        self.cache_addresses = np.zeros((len(compiled.layers), len(names), self.n, 2), np.int64)
        self.shared_rows = compiled.shared_rows(names)
        self._cache_views: dict[tuple[int, str], View] = {}
        self._by_rows: dict[tuple[str, int, int], Partition] = {}

    def task(self, kernel: OperandKernel, parts: Partition | int, **operands: Any) -> None:
        """Adds a task: see `Schedule.task`."""
        self.schedule.task(kernel, parts, **operands)

    def call(self, function: Callable[[], None]) -> None:
        """Adds a function that runs after all tasks before it, and before all that follow."""
        self.schedule.call(function)

    def by_rows(self, view: View) -> Partition:
        """Runs of rows, all columns of each."""
        key = view.axis, view.rows, view.size
        if key not in self._by_rows:
            self._by_rows[key] = Partition(view.axis, view.rows, min(self.row_step, max(view.rows, 1)), view.size, view.size)
        return self._by_rows[key]

    def by_cells(self, view: View, row_step: int = 1) -> Partition:
        """Runs of CELL columns of `row_step` rows."""
        return Partition(view.axis, view.rows, row_step, view.size, CELL)

    @cached_property
    def ranges(self) -> np.ndarray:
        """int64 [sequences, 2]: the first row of each, and how many."""
        counts = np.array(self.counts, np.int64)
        return np.stack([np.cumsum(counts) - counts, counts], axis=1)

    @cached_property
    def all_tokens(self) -> int:
        """The address of the job of a product with one matrix: int64 [1, 4] (see gemv.gemv and gemm_kernels)."""
        return self.schedule.numbers((0, 0, self.n, 0))

    def constant(self, array: np.ndarray) -> int:
        """The address of an array, which then lives as long as the pass."""
        self.schedule.keep(array)
        return array.ctypes.data

    def copy(self, x: View, out: View, partition: Partition | None = None, index: View | None = None) -> None:
        """out = x, or x[index]; index: int64, one number per row of out."""
        self.task(row_kernels.copy, partition or self.by_rows(out), x=x, out=out, index=index)

    def copied(self, view: View) -> View:
        out = self.temporary(view.rows, view.heads, view.width, view.axis)
        self.copy(view, out)
        return out

    def dense(self, value: Value) -> View:
        """A value's rows without gaps: copied if they have any."""
        view = self.view(value)
        return view if view.is_dense else self.copied(view)

    def contiguous(self, value: Value) -> View:
        """A value with the numbers of each row without gaps: copied if they have any."""
        view = self.view(value)
        return view if view.is_row else self.copied(view)

    def rotate(self, x: View, out: View, rotation: tuple[int, ...], by_heads: Partition | None = None) -> View:
        """out = x, its heads rotated as rows of a cache are (see `CachePart`); once more undoes it. out may be x. Returns out.

        by_heads: of the tasks before and after it, whose rows are the heads of tokens (x and out are dense then)."""
        to, partition = out, self.by_rows(x)
        if by_heads is not None:
            x, to = (replace(v, rows=v.rows * v.heads, row_bytes=v.head_bytes, heads=1, axis=by_heads.axis) for v in (x, to))
            partition = replace(by_heads, columns=x.width, column_step=x.width)
        self.task(hadamard.transform, partition, x=x, out=to, blocks=np.array(rotation, np.int64), count=len(rotation))
        return out

    def cache_view(self, layer: int, name: str) -> View:
        """A view without memory that stands for a layer's cached rows of a name in the reads and writes of tasks."""
        if (layer, name) not in self._cache_views:
            self._cache_views[layer, name] = dense(self.pool.take(0), 1, 1, 1)
        return self._cache_views[layer, name]

    def write_cache(self, layer: int, name: str, x: View) -> None:
        """Appends x to the caches of a layer."""
        part = self.compiled.part(layer, name)
        if part.rotation:
            x = self.rotate(x, self.temporary(x.rows, x.heads, x.width), part.rotation)
        is_float, blocks = TYPES[part.type].is_float, cache_blocks.STORES.get(part.type)
        if not (is_float or blocks):

            def put() -> None:
                rows = x.array
                for cache, at in self.run_inputs.batch:
                    cache.put(layer, name, rows[at], is_rotated=True)

            self.call(put)
            return
        addresses = self.cache_addresses[layer, self.names.index(name)]
        operands: dict[str, Any] = {"x": x, "addresses": addresses, "writes": (self.cache_view(layer, name),)}
        if blocks is None:
            blocks, operands["type_id"] = row_kernels.store_in_cache, TYPE_IDS[part.type]
        self.schedule.task(blocks, self.by_rows(x), **operands)
