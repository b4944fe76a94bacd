"""One pass through a graph: the steps of ops emit its tasks, and addresses and positions are filled in before each run.

A pass is written for a number of tokens per sequence. What changes from run to run (rows in the caches, positions, how
attention is divided) is patched into its tables, so that a pass is written once and run for token after token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ....formats import TYPES
from ...graph import Observer, Value
from ...graph.ops import Linear, Op
from ...graph.values import RotaryEmbedding, Weight
from . import schedule
from .attention_jobs import AttentionJobs
from .kernels import row_parts
from .kernels.attention.cache_rows import TYPE_IDS
from .kernels.gemv_plan import GEMV_TOKENS
from .kv_cache import KVCache
from .memory import TOKENS, Partition, Pool, View, dense, with_heads
from .schedule import Schedule

if TYPE_CHECKING:
    from .executable import Executable

CELL = 1024  # columns of a part where rows are divided: a multiple of all blocks
_ROW_NUMBERS = 16384  # numbers of the rows of one part: several microseconds

Batch = list[tuple[KVCache, slice]]  # the cache of each sequence, and the rows that are its tokens


@dataclass
class Run:
    """The inputs of the current run of a pass, which its functions read."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    batch: Batch = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    inputs: np.ndarray | None = None


@dataclass
class PassValue:
    """A value of the graph in a pass.

    view         its memory
    partition    of the task that writes it, if that has one
    inputs       its forms for products (8-bit codes, blocks of bf16, ...), by block of activations or form of input
    blocks       memory that is freed with it
    is_observed  whether the observer gets it already, as input of an op
    """

    view: View
    partition: Partition | None = None
    inputs: dict[Any, Any] = field(default_factory=dict)
    blocks: list[View] = field(default_factory=list)
    is_observed: bool = False


class Pass:
    """Collects the tasks of one pass.

    n         tokens; `counts` of each sequence
    use_gemv  whether products of few tokens may be made by GEMV: not of observed ones, nor where a token's results must not
              depend on how many others there are
    gemv      whether products are made by GEMV
    observer  None, or one that wants something of this graph
    """

    def __init__(
        self,
        executable: Executable,
        counts: tuple[int, ...],
        names: tuple[str, ...],
        use_gemv: bool,
        observer: Observer | None,
    ):
        self.executable, self.counts, self.observer = executable, counts, observer
        self.settings, self.workers, self.threads = executable.settings, executable.workers, executable.workers.count
        self.n = sum(counts)
        is_observed = observer is not None and any(observer.wants_input(op) for op in executable.all_ops)
        self.use_gemv = use_gemv and not is_observed
        self.gemv = self.use_gemv and self.n <= GEMV_TOKENS
        self.row_step = max(1, _ROW_NUMBERS // executable.graph.n_embd)
        self.schedule, self.pool, self.run_state = Schedule(), Pool(), Run()
        self.values: dict[int, PassValue] = {}
        self.names = names  # of the rows of the caches
        self.attention = AttentionJobs(self, executable.attention_layers)
        self.cache_addresses = np.zeros((len(executable.layers), len(names), self.n, 2), np.int64)
        self.state_addresses = np.zeros((len(counts), 2), np.int64)  # of the states that are read, and written
        self._ropes: dict[tuple, tuple[RotaryEmbedding, np.ndarray]] = {}
        self._users: dict[int, int] = {}  # values by block
        self._temporary: list[View] = []
        self.position, self.ops = 0, tuple[Op, ...]()  # number and ops of the step that is being lowered
        self.inner_pool = Pool()  # for passes within this one
        self._cache_views: dict[tuple[int, str], View] = {}

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, rows: int, heads: int, width: int, axis: str = TOKENS) -> View:
        """Dense rows of memory that nothing else uses until it is freed."""
        return dense(self.pool.take(4 * rows * heads * width), rows, heads, width, axis)

    def temporary(self, rows: int, heads: int, width: int, axis: str = TOKENS) -> View:
        """Rows that live until the lowering of this op is done."""
        view = self.allocate(rows, heads, width, axis)
        self._temporary.append(view)
        return view

    def take_temporary(self, view: View) -> View:
        """Has memory live until the lowering of this op is done."""
        self._temporary.append(view)
        return view

    def numbers(self, count: int, dtype: type = np.int64) -> View:
        """Memory for numbers of a dtype, as one row."""
        nbytes = count * np.dtype(dtype).itemsize
        return View(self.pool.take(nbytes), 0, 1, nbytes, 1, nbytes, count, dtype)

    def words(self, count: int, dtype: type = np.int64) -> View:
        """As `numbers`, until the lowering of this op is done."""
        return self.take_temporary(self.numbers(count, dtype))

    def release_temporary(self) -> None:
        for view in self._temporary:
            self.pool.give_back(view.block)
        self._temporary = []

    # --- values -------------------------------------------------------------------------------------------------------

    def new(self, value: Value, like: View | None = None, partition: Partition | None = None) -> View:
        """Memory for a value of the graph, with the rows of `like` (None: the tokens)."""
        heads, width = value.shape if len(value.shape) == 2 else (1, value.shape[0])
        rows, axis = (self.n, TOKENS) if like is None else (like.rows, like.axis)
        if axis != TOKENS:  # per token and expert: the shape's first axis are the experts
            heads = 1
        view = self.allocate(rows, heads, width, axis)
        self.put(value, view, partition)
        return view

    def put(self, value: Value, view: View, partition: Partition | None = None) -> None:
        """Sets the memory of a value; several values may share a block."""
        self.values[value.index] = PassValue(view, partition)
        self._users[id(view.block)] = self._users.get(id(view.block), 0) + 1

    def view(self, value: Value) -> View:
        return self.values[value.index].view

    def dense(self, value: Value) -> View:
        """A value's rows without gaps: copied if they have any."""
        view = self.view(value)
        return view if view.is_dense else self.copied(view)

    def copied(self, view: View) -> View:
        out = self.temporary(view.rows, view.heads, view.width, view.axis)
        self.copy(view, out)
        return out

    def borrow(self, value: Value, view: View) -> None:
        """As `put`, with memory that does not belong to this pass."""
        self.put(value, view)
        self._users[id(view.block)] += 1

    def drop(self, index: int) -> None:
        """Frees the value of this index, which no later op reads."""
        stored = self.values.pop(index)
        block = stored.view.block
        for view in stored.blocks:
            self.pool.give_back(view.block)
        self._users[id(block)] -= 1
        if not self._users[id(block)]:
            del self._users[id(block)]
            self.pool.give_back(block)

    def keep_with(self, value: Value, view: View) -> View:
        """Has memory live as long as a value."""
        self.values[value.index].blocks.append(view)
        return view

    def overwritable(self, value: Value) -> bool:
        """Whether the op that is being lowered, as the last to read a value, may write its result there."""
        last_use = self.executable.last_use
        if last_use[value.index] > self.position or sum(value in op.inputs for op in self.ops) > 1:
            return False
        view = self.values[value.index].view
        low, high = view.span
        for index, other in self.values.items():
            if other.view.block is view.block and last_use[index] > self.position:
                other_low, other_high = other.view.span
                if other_low < high and low < other_high:
                    return False
        return True

    def result(self, value: Value, source: Value, partition: Partition | None, rows: bool = False) -> View:
        """Memory for a value that is computed from `source` element by element: that of the source where it may be overwritten.

        rows: the numbers of each row have to be contiguous."""
        view = self.view(source)
        if (rows and not view.is_row) or not self.overwritable(source):
            return self.new(value, view, partition)
        if len(value.shape) == 2 and view.axis == TOKENS and view.heads != value.shape[0]:
            view = view.reshaped(*value.shape)
        self.put(value, view, partition)
        return view

    # --- tasks --------------------------------------------------------------------------------------------------------

    def by_rows(self, view: View) -> Partition:
        """Runs of rows, all columns of each."""
        return Partition(view.axis, view.rows, min(self.row_step, max(view.rows, 1)), view.size, view.size)

    def by_cells(self, view: View, row_step: int = 1) -> Partition:
        """Runs of CELL columns of `row_step` rows."""
        return Partition(view.axis, view.rows, row_step, view.size, CELL)

    def copy(self, x: View, out: View, partition: Partition | None = None, index: View | None = None) -> None:
        """out = x, or x[index]; index: int64, one number per row of out."""
        partition = partition or self.by_rows(out)
        words = (x.address, x.row_bytes, x.head_bytes, x.heads, x.width, out.address, out.row_bytes, out.head_bytes)
        reads = (x,) if index is None else (x, index)
        table = (*partition.words(), *words, 0 if index is None else index.address)
        self.schedule.task(row_parts.copy.address, table, partition, reads, (out,))

    def add_bias(self, x: View, bias: np.ndarray, partition: Partition, matrices: View | None = None) -> None:
        """x += bias float32 [matrices, columns], the row of each row's matrix."""
        words = (x.address, x.row_bytes, self.constant(bias), 0 if matrices is None else matrices.address)
        reads = (x,) if matrices is None else (x, matrices)
        self.schedule.task(row_parts.add_bias.address, (*partition.words(), *words), partition, reads, (x,))

    def scale_rows(self, x: View, factors: np.ndarray, partition: Partition, matrices: View | None = None) -> None:
        """x *= factors float32 [matrices], that of each row's matrix."""
        words = (x.address, x.row_bytes, self.constant(factors), 0 if matrices is None else matrices.address)
        reads = (x,) if matrices is None else (x, matrices)
        self.schedule.task(row_parts.scale_rows.address, (*partition.words(), *words), partition, reads, (x,))

    def constant(self, array: np.ndarray) -> int:
        """The address of an array, which then lives as long as the pass."""
        self.schedule.keep(array)
        return array.ctypes.data

    def rotations(self, rope: RotaryEmbedding) -> np.ndarray:
        """complex64 [n, pairs], filled in before each run."""
        key = (rope.frequencies.tobytes(), rope.magnitude, rope.offset)
        if key not in self._ropes:
            self._ropes[key] = rope, np.zeros((self.n, len(rope.frequencies)), np.complex64)
        return self._ropes[key][1]

    def cache_view(self, layer: int, name: str) -> View:
        """A view without memory that stands for a layer's cached rows of a name in the reads and writes of tasks."""
        if (layer, name) not in self._cache_views:
            self._cache_views[layer, name] = dense(self.pool.take(0), 1, 1, 1)
        return self._cache_views[layer, name]

    def write_cache(self, layer: int, name: str, x: View) -> None:
        """Appends x to the caches of a layer."""
        part = self.executable.part(layer, name)
        if not TYPES[part.type].is_float or part.every > 1:

            def put() -> None:
                rows = x.array
                for cache, at in self.run_state.batch:
                    cache.put(layer, name, rows[at])

            self.schedule.call(put)
            return
        partition = self.by_rows(x)
        addresses = self.cache_addresses[layer, self.names.index(name)]
        words = (x.address, x.row_bytes, x.head_bytes, x.heads, x.width, TYPE_IDS[part.type], addresses.ctypes.data)
        table = (*partition.words(), *words)
        self.schedule.task(row_parts.cache.address, table, partition, (x,), (self.cache_view(layer, name),))

    def inner(self, rows: int, gemv: bool, position: int, ops: tuple[Op, ...]) -> Pass:
        """A pass over other rows, for a function of this one; position, ops: of the step that it is for."""
        out = Pass(self.executable, (rows,), (), self.use_gemv, None)
        out.gemv, out.pool, out.position, out.ops = gemv, self.inner_pool, position, ops
        return out

    def call(self, function: Callable[[], None]) -> None:
        self.schedule.call(function)

    def observe_inputs(self, value: Value) -> None:
        """Reports a value to the observer, once, as the input of the linear ops that multiply it."""
        stored = self.values[value.index]
        if self.observer is None or stored.is_observed:
            return
        stored.is_observed, observer = True, self.observer
        observed_ops = [op for op in self.executable.users[value.index] if isinstance(op, Linear) and observer.wants_input(op)]
        if observed_ops:
            x = self.dense(value).matrix

            def report() -> None:
                for op in observed_ops:
                    observer.on_input(op, op.weight, 0, x)

            self.call(report)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """To be called when all ops are lowered."""
        self._steps = self.schedule.finish()
        self.attention.finish()

    def run(self, tokens: np.ndarray, caches: list[tuple[KVCache, int]], inputs: np.ndarray | None = None) -> None:
        """Runs the pass; `caches` then have the tokens' rows, not yet committed. inputs: rows for `HiddenInput`."""
        state, row = self.run_state, 0
        state.tokens, state.inputs, state.batch, positions = tokens, inputs, [], []
        for cache, count in caches:
            state.batch.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        state.positions = np.concatenate(positions) if positions else np.empty(0, np.int64)
        for rope, table in self._ropes.values():
            angles = (state.positions[:, None] + rope.offset) * rope.frequencies
            table.real, table.imag = rope.magnitude * np.cos(angles), rope.magnitude * np.sin(angles)
        self._set_cache_addresses()
        self.attention.patch(state.batch)
        with np.errstate(all="ignore"):  # NaN and infinity are looked for in results, not reported by the hardware
            schedule.run(self._steps, self.workers)

    def _set_cache_addresses(self) -> None:
        """Writes the addresses of the tokens' rows in the caches, of every layer and name, and of the sequences' states."""
        for sequence, (cache, at) in enumerate(self.run_state.batch):
            if cache.state is not None:
                self.state_addresses[sequence] = cache.state.addresses()
            if not self.names:
                continue
            rows = cache.table(at.stop - at.start)
            positions = np.arange(cache.length, cache.length + at.stop - at.start)
            self.cache_addresses[:, :, at, 0] = rows[:, :, None, 0] + positions * rows[:, :, None, 1]
            self.cache_addresses[:, :, at, 1] = rows[:, :, None, 2]


class Step:
    """One op, or several that are lowered as one: made when a graph is compiled, and emitted into every pass."""

    def __init__(self, executable: Executable, op: Op):
        self.executable = executable
        self.ops: tuple[Op, ...] = (op,)

    def emit(self, out: Pass) -> None:
        """Adds the tasks of the ops to a pass."""
        raise NotImplementedError

    def output(self, out: Pass, op: Op) -> np.ndarray | None:
        """An op's result, float32 [n, *op.out.shape], for an observer; None: there is none, or the step reports it itself."""
        view = out.view(op.out)
        return with_heads(view, *op.out.shape).array if len(op.out.shape) == 2 else view.matrix

    def vector(self, weight: Weight | None) -> np.ndarray | None:
        """The numbers of a norm or bias, float32, axes in numpy's order; None for None."""
        return None if weight is None else self.executable.vector(weight)
