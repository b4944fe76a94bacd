"""One pass through a graph: the steps of ops emit its tasks, and addresses and positions are filled in before each run.

A pass is written for a number of tokens per sequence. What changes from run to run (rows in the caches, positions, how
attention is divided) is patched into its records, so that a pass is written once and run for token after token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....simd.lanes import LANES
from ...graph import Observer, Value
from ...graph.ops import Linear, Op
from ...graph.values import RotaryEmbedding, Temperature
from . import schedule
from .attention_jobs import AttentionJobs
from .compiled_graph import CompiledGraph
from .kernels.attention.running_softmax import round_up
from .kv_cache import KVCache
from .memory import Pool
from .pass_tasks import PassTasks

_RUN = 64  # positions that are computed at once for tokens that are generated one by one: it takes hardly longer than one


class Rotations:
    """table: complex64 [n, pairs], of the positions that were filled in last."""

    def __init__(self, rope: RotaryEmbedding, n: int):
        self.rope, self.table = rope, np.zeros((n, len(rope.frequencies)), np.complex64)
        self._first, self._run = -1, self.table  # a run of positions, of a pass of one token

    def fill(self, positions: np.ndarray) -> None:
        """int64 [n]."""
        if len(positions) > 1:
            self._compute(positions, self.table)
            return
        at = int(positions[0])
        if at - at % _RUN != self._first:
            self._first, self._run = at - at % _RUN, np.empty((_RUN, self.table.shape[1]), np.complex64)
            self._compute(np.arange(self._first, self._first + _RUN), self._run)
        self.table[0] = self._run[at % _RUN]

    def _compute(self, positions: np.ndarray, out: np.ndarray) -> None:
        angles = (positions[:, None] + self.rope.offset) * self.rope.frequencies
        out.real, out.imag = self.rope.magnitude * np.cos(angles), self.rope.magnitude * np.sin(angles)


class PassProgram(PassTasks):
    """The programs and functions of one pass.

    gemv      whether it is made of the kernels for tokens that are generated: products by GEMV, keys divided among threads,
              latents that absorb; else of those for prompts. So a token's results depend on this alone, and not on how many
              others there are. Not where inputs are observed, nor for more than `gemv_tokens` of
              the graph.
    experts_by_gemv  whether products of experts are: those of generated tokens, and of a whole prompt that has few tokens for
              each expert (is_short_prompt), where all else is as for other prompts
    observer  None, or one that wants something of this graph
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        counts: tuple[int, ...],
        names: tuple[str, ...],
        generated: bool,
        observer: Observer | None,
        is_short_prompt: bool = False,
    ):
        super().__init__(compiled, counts, names)
        self.observer = observer
        is_observed = observer is not None and any(observer.wants_input(op) for op in compiled.all_ops)
        self.gemv = generated and not is_observed and self.n <= compiled.gemv_tokens
        self.experts_by_gemv = self.gemv or (is_short_prompt and not is_observed)
        self.attention = AttentionJobs(self, compiled.attention_layers)
        self._cache_tables: list[np.ndarray | None] = [None] * len(counts)  # whose strides cache_addresses has
        self.state_addresses = np.zeros((len(counts), 2), np.int64)  # of the states that are read, and written
        self.lengths = np.zeros(len(counts), np.int64)  # tokens of each sequence before the pass
        # Addresses of the rows of each sequence, bytes of one, and of a head's: see KVCache.table.
        self.row_addresses = np.zeros((len(counts), len(compiled.layers), len(names), 3), np.int64)
        self.scores = np.zeros(2, np.int64)  # see kernels.attention.token_selection
        self._score_memory: np.ndarray | None = None
        self._score_keys = 0  # of a token, at the most, that there is memory for
        self._scored: set[tuple[int, int]] = set()
        self._ropes: dict[tuple, Rotations] = {}
        self._before: list[Callable[[], None]] = []
        self._temperatures: dict[Temperature, np.ndarray] = {}
        self._matrices: dict[int, np.ndarray] = {}
        self.inner_pool = Pool(is_transient=True)  # for passes within this one, each of which runs when it is written

    def rotations(self, rope: RotaryEmbedding) -> np.ndarray:
        """complex64 [n, pairs], filled in before each run."""
        key = (rope.frequencies.tobytes(), rope.magnitude, rope.offset)
        if key not in self._ropes:
            self._ropes[key] = Rotations(rope, self.n)
        return self._ropes[key].table

    def temperatures(self, temperature: Temperature) -> np.ndarray:
        """float32 [n], the factors of the tokens' positions, filled in before each run."""
        if temperature not in self._temperatures:
            factors = self._temperatures[temperature] = np.zeros(self.n, np.float32)

            def fill() -> None:
                factors[:] = temperature.factors(self.run_inputs.positions)

            self.before_each_run(fill)
        return self._temperatures[temperature]

    def before_each_run(self, function: Callable[[], None]) -> None:
        """function: of what is looked up by token or position, for all layers at once, so that none waits for Python."""
        self._before.append(function)

    def scores_of(self, tokens: int, heads: int) -> np.ndarray:
        """`scores`, of which each token has memory then for one of every so many tokens up to itself, by heads."""
        self._scored.add((tokens, heads))
        return self.scores

    def _score_numbers(self, keys: int) -> int:
        return max((heads * round_up(-(-keys // tokens), LANES) for tokens, heads in self._scored), default=0)

    def nbytes(self, keys: int | None = None) -> int:
        """Of the pass's memory, with scores of so many keys; None: of as many as there have been."""
        return self.pool.nbytes + 4 * self.n * self._score_numbers(self._score_keys if keys is None else keys)

    def inner(self, rows: int, position: int, ops: tuple[Op, ...]) -> PassProgram:
        """A pass over other rows, by the kernels for prompts, for a function of this one; position, ops: of the step that it is
        for."""
        out = PassProgram(self.compiled, (rows,), (), False, None)
        out.pool, out.position, out.ops = self.inner_pool, position, ops
        return out

    def observe_inputs(self, value: Value) -> None:
        """Reports a value to the observer, once, as the input of the linear ops that multiply it."""
        stored = self.values[value.index]
        if self.observer is None or stored.is_observed:
            return
        stored.is_observed, observer = True, self.observer
        observed_ops = [op for op in self.compiled.users[value.index] if isinstance(op, Linear) and observer.wants_input(op)]
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

    def matrix(self, value: Value) -> np.ndarray:
        """[n, numbers of a row] of a value that outlives the steps: the same array in every run."""
        if value.index not in self._matrices:
            self._matrices[value.index] = self.view(value).matrix
        return self._matrices[value.index]

    def release(self) -> None:
        """Lets go of the memory of a pass that is not going to run again."""
        self.pool.release()
        self.inner_pool.release()
        self.forget()

    def forget(self) -> None:
        """Lets go of all that a pass refers to, but for memory that it shares. Its functions hold it, and it the weights: so
        they go now, not when cycles are looked for."""
        self.__dict__.clear()

    def run(self, tokens: np.ndarray, caches: list[tuple[KVCache, int]], inputs: np.ndarray | None = None) -> None:
        """Runs the pass; `caches` then have the tokens' rows, not yet committed. inputs: rows for `HiddenInput`."""
        state, row = self.run_inputs, 0
        state.tokens, state.inputs, state.batch, positions = tokens, inputs, [], []
        for cache, count in caches:
            state.batch.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        state.positions = positions[0] if len(positions) == 1 else np.concatenate([np.empty(0, np.int64), *positions])
        for rotations in self._ropes.values():
            rotations.fill(state.positions)
        for function in self._before:
            function()
        self._set_cache_addresses()
        self.attention.patch(state.batch)
        with np.errstate(all="ignore"):  # NaN and infinity are looked for in results, not reported by the hardware
            schedule.run(self._steps, self.workers)

    def _set_cache_addresses(self) -> None:
        """Writes the addresses of the tokens' rows in the caches, of every layer and name, and of the sequences' states."""
        keys = 1 + int(self.run_inputs.positions.max(initial=0)) if self._scored else 0
        if keys > self._score_keys:
            self._score_keys = 2 * keys if self.gemv else keys  # the next pass has one more, or many tokens more
            self._score_memory = None  # before there is more
            numbers = self._score_numbers(self._score_keys)
            self._score_memory = np.empty((self.n, numbers), np.float32)
            self.scores[:] = self._score_memory.ctypes.data, numbers
        for sequence, (cache, at) in enumerate(self.run_inputs.batch):
            self.lengths[sequence] = cache.length
            if cache.state is not None:
                self.state_addresses[sequence] = cache.state.addresses()
            if not self.names:
                continue
            rows, positions = cache.table(at.stop - at.start), self.run_inputs.positions[at]
            np.multiply(rows[:, :, None, 1], positions, out=self.cache_addresses[:, :, at, 0])
            self.cache_addresses[:, :, at, 0] += rows[:, :, None, 0]
            if rows is not self._cache_tables[sequence]:
                self._cache_tables[sequence] = rows
                self.row_addresses[sequence] = rows
                self.cache_addresses[:, :, at, 1] = rows[:, :, None, 2]
            for every, layers, names in self.shared_rows:  # of the last token of a run, the others write none
                own = rows[layers, names, 0][:, None] + rows[layers, names, 1][:, None] * (positions // every)
                self.cache_addresses[layers, names, at, 0] = np.where((positions + 1) % every, 0, own)
