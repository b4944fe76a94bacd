"""A graph compiled for the processor: each op's step, and the passes that steps are emitted into."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from ....formats import PlanError, TensorType
from ....simd.compile.background import compile_in_background
from ....simd.workers import Workers
from ...graph import Graph, Value, check_support
from ...graph.ops import BY_TOKEN, LatentAttention, Op, Route
from ...settings import Settings
from .. import CACHED_BYTES, Executable, last_rows
from ..reference.functions import SUPPORT
from .compiled_graph import CompiledGraph
from .kernels.gemm.gemm import gemm_unit
from .kernels.gemv.gemv import gemv_unit, several_unit
from .kv_cache import KVCache
from .lower import slow_kernels, steps_of
from .lower.step import Step
from .pass_program import PassProgram
from .weights import WeightStore

_CACHED_PASSES = 8  # shapes of passes that are kept for the next run
_END = 1 << 60
_LONG_PASS = 256  # tokens, from which on a pass says how far it is
_LEAST_SHARE = 0.01  # of a pass, between two times that it does


def compile_graph(graph: Graph, store: WeightStore, settings: Settings) -> CpuExecutable:
    """Compiles a graph. Raises PlanError for an op, an option of one, or a setting that this backend does not know."""
    return CpuExecutable(graph, store, settings)


def compile_ahead(types: Iterable[TensorType]) -> None:
    """Has processes of low priority compile products with weights of these types, for models that will be run later: of prompts
    without `Settings.fast`, then of one generated token."""
    names = [each.name for each in types]
    compile_in_background([*map(gemm_unit, names), *map(gemv_unit, names)], urgent=False)


def _release(kept: dict[tuple, list[PassProgram]]) -> None:
    """Lets go of what an executable kept."""
    for passes in kept.values():
        for one in passes:
            one.release()
    kept.clear()


class CpuExecutable(Executable):
    """A graph that can be run, by several threads at once if need be.

    graph     as it was compiled
    store     the weights
    """

    def __init__(self, graph: Graph, store: WeightStore, settings: Settings):
        check_support(graph, "cpu", SUPPORT)
        self.graph, self.store, self.settings = graph, store, settings
        if settings.expert_reduction is not None and not any(isinstance(op, Route) for op in graph.ops):
            keep, share = settings.expert_reduction
            raise PlanError(f"-ser {keep},{share} has no effect: {store.source.path} has no experts")
        self.compiled = CompiledGraph(graph, store, settings)
        self.steps, self.head_steps = steps_of(self.compiled, graph.ops), steps_of(self.compiled, graph.head)
        self._find_last_uses()
        self._tail = tail_start(self.steps, graph.hidden)
        self._tail_inputs = values_from_before(self.steps, self._tail)
        self._passes: OrderedDict[tuple, list[PassProgram]] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _release, self._passes).atexit = False

    @property
    def workers(self) -> Workers:
        """The threads that it computes with."""
        return self.store.workers

    @property
    def decode_batch(self) -> int:
        """As many as GEMV takes."""
        return self.compiled.gemv_tokens

    @property
    def short_prompt(self) -> int:
        """As many as there are few of for each expert."""
        return self.compiled.short_prompt

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the table of embeddings: int [n] -> float32 [n, n_embd]."""
        return self.compiled.matrix(self.graph.embedding).lookup(ids)

    def _find_last_uses(self) -> None:
        """Fills in the number of the last step that reads each value (or writes it), and each step's `last_read`."""
        last, values = self.compiled.last_use, list[tuple[int, Step, tuple[int, ...]]]()
        for steps in (self.steps, self.head_steps):
            for number, step in enumerate(steps):
                indices = tuple(dict.fromkeys(value.index for op in step.ops for value in (*op.inputs, *op.outputs)))
                values.append((number, step, indices))
                last.update(dict.fromkeys(indices, number))
        last.update({value.index: _END for value in (self.graph.hidden, self.graph.logits) if value is not None})
        for number, step, indices in values:
            step.last_read = tuple(index for index in indices if last[index] == number)

    # --- running ------------------------------------------------------------------------------------------------------

    def new_cache(self, limit: int) -> KVCache:
        """An empty cache for a sequence of at most `limit` tokens."""
        layers = self.compiled.layers if self.observer is None else self.compiled.observed_layers
        return KVCache(layers, limit, self.settings.checkpoints)

    def hidden(
        self,
        tokens: np.ndarray,
        caches: Sequence[tuple[KVCache, int]],
        inputs: np.ndarray | None = None,
        generated: bool = False,
        last: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One pass. tokens int [n]; caches: each sequence's cache and how many of the tokens, in order, are its next ones;
        inputs: float32 [n, n_embd], for graphs with a `HiddenInput`; generated: see `PassProgram`; last: how many of each
        sequence's last tokens are wanted, None: all.

        Returns the value `hidden` of the graph, float32 [n or wanted, n_embd]; the caches then hold the tokens. What follows
        the last op that sees other tokens, most of the last layer, is computed for the wanted ones alone.
        """
        for cache, count in caches:
            cache.check_capacity(count)
        counts, observer = tuple(count for _, count in caches), self.observer
        rows = last_rows(counts, last)
        stop = self._tail if observer is None and rows is not None else len(self.steps)
        is_short = self._is_short_prompt(caches) if generated else False
        generated = generated and not is_short
        key = (counts, caches[0][0].names, generated)
        current = self._take((*key, is_short, stop)) if observer is None else None
        if current is None:
            self._compile_in_background(generated, is_short, sum(counts))
            current = PassProgram(self.compiled, *key, observer, is_short)
            self._write(current, self.steps, range(stop))
        current.run(tokens, list(caches), inputs)
        if rows is None or stop == len(self.steps):
            hidden = current.matrix(self.graph.hidden)
            out = hidden.copy() if rows is None else hidden[rows]
        else:
            inputs_of_tail = [current.view(value).array[rows] for value in self._tail_inputs]
            out = self._run_tail(inputs_of_tail, len(rows), generated, is_short)
            if current.n >= _LONG_PASS:
                self._share_done(1.0)
        if observer is None:
            self._keep((*key, is_short, stop), current)
        else:
            current.release()
        for cache, count in caches:
            cache.commit(count)
        return out

    def _is_short_prompt(self, caches: Sequence[tuple[KVCache, int]]) -> bool:
        """Whether a pass for tokens that are generated is that of a prompt of more tokens than there are products for."""
        return len(caches) == 1 and not caches[0][0].length and self.decode_batch < caches[0][1] <= self.short_prompt

    def _run_tail(self, inputs: Sequence[np.ndarray], n: int, generated: bool, is_short: bool) -> np.ndarray:
        """The steps from `_tail` on for n tokens, float32 [n, n_embd]; inputs: of these, the values that come from before."""
        if not n:
            return np.empty((0, self.graph.n_embd), np.float32)
        key = "tail", n, generated, is_short
        tail = self._take(key)
        if tail is None:
            tail = PassProgram(self.compiled, (n,), (), generated, None, is_short)
            for value in self._tail_inputs:
                tail.new(value)
                tail.matrix(value)  # where it lies: later steps drop the value
            self._write(tail, self.steps, range(self._tail, len(self.steps)))
        for value, rows in zip(self._tail_inputs, inputs, strict=True):
            tail.matrix(value)[:] = rows.reshape(n, -1)
        tail.run(np.empty(0, np.int64), [])
        out = tail.matrix(self.graph.hidden).copy()
        self._keep(key, tail)
        return out

    def logits(self, hidden: np.ndarray, generated: bool | None = None) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]. Raises PlanError for a model without a head."""
        generated = len(hidden) <= self.decode_batch if generated is None else generated
        if self.graph.logits is None:
            raise PlanError(f"{self.store.source.path}: {self.graph.architecture} has no output matrix: it predicts no tokens")
        key, observer = ("head", len(hidden), generated), self.observer
        head = self._take(key) if observer is None else None
        if head is None:
            head = PassProgram(self.compiled, (len(hidden),), (), generated, observer)
            head.new(self.graph.hidden)
            self._write(head, self.head_steps, range(len(self.head_steps)))
        head.matrix(self.graph.hidden)[:] = hidden
        head.run(np.empty(0, np.int64), [])
        logits = head.matrix(self.graph.logits)
        if observer is not None or len(hidden) > self.decode_batch:
            head.release()
            return logits
        logits = logits.copy()  # before another thread may take the pass
        self._keep(key, head)
        return logits

    def pass_bytes(self, counts: Sequence[int], context: int) -> int:
        """The blocks of the pass, which is written and not run, and what its steps take while they run: what one has freed, or
        keeps for the next layer, serves others of its kind, and no other steps."""
        out = PassProgram(self.compiled, tuple(counts), self.new_cache(1).names, False, self.observer)
        self._write(out, self.steps, range(len(self.steps)))
        nbytes = out.nbytes(context)
        out.release()
        most = dict[type[Step], int]()
        for step in self.steps:
            most[type(step)] = max(most.get(type(step), 0), step.inner_bytes(counts, context, self.observer))
        return nbytes + sum(most.values())

    def cache_bytes(self, tokens: int, passes: int) -> int:
        """Of recurrent states there is the one before the last pass, and from the second pass on one to write to."""
        layers = self.compiled.layers
        states = min(passes + 1, 3) * sum(layer.state_bytes for layer in layers)
        return tokens * sum(layer.token_bytes for layer in layers) + states

    def weight_bytes(self) -> int:
        ops = (*self.graph.ops, *self.graph.head)
        names = {weight.name for op in ops for weight in op.weights if len(weight.shape) > 1}
        made = sum(step.made_bytes for step in self.steps)
        return self.store.kept_bytes(names, {weight.name for step in self.steps for weight in step.decoded}, made)

    def release(self) -> None:
        with self._lock:
            kept = dict(self._passes)
            self._passes.clear()
        _release(kept)
        self.store.release()

    def _compile_in_background(self, generated: bool, is_short: bool, tokens: int) -> None:
        """Has other processes compile what takes longest of this graph's parts, or of products for generated tokens; of a short
        prompt of a mixture both."""
        if self.workers.count > 1:
            stored = [tensor.stored for tensor in self.store.source.tensors.values() if len(tensor.shape) > 1]
            types = list(dict.fromkeys(each.name for each in stored if each is not None))
            ops = dict.fromkeys(map(type, self.compiled.all_ops))
            if None in stored or LatentAttention in ops:  # rows decoded by Python, and latents, are multiplied as float32
                types = ["f32", *(name for name in types if name != "f32")]
            parts = [part.unit for op in ops for part in slow_kernels(op, self.settings.cache_types)]
            units = [gemm_unit(name, self.store.fast) for name in reversed(types)]
            kinds = (gemv_unit, several_unit) if tokens > 1 else (gemv_unit,)
            few = [unit(name) for name in types for unit in kinds] if generated or is_short else []
            compile_in_background([*few, *parts] if generated else [*parts[:1], *units, *few, *parts[1:]])

    def _share_done(self, share: float) -> None:
        if self.on_share is not None:
            self.on_share(share)

    def _write(self, out: PassProgram, steps: Sequence[Step], part: range) -> None:
        """Emits the steps of these numbers into a pass."""
        is_long = steps is self.steps and out.n >= _LONG_PASS
        shares = _shares(steps) if is_long else [0.0] * len(steps)
        reported = 0.0
        done = partial(CpuExecutable._share_done, weakref.proxy(self))  # a pass that holds what keeps it would stay for good
        for out.position in part:
            step = steps[out.position]
            out.ops = step.ops
            step.emit(out)
            if shares[out.position] >= min(1.0, reported + _LEAST_SHARE) > reported:
                reported = shares[out.position]
                out.call(partial(done, reported))
            self._observe_outputs(out, step)
            out.release_temporary()
            for index in step.last_read:
                if index in out.values:
                    out.drop(index)
        out.finish()

    def _observe_outputs(self, out: PassProgram, step: Step) -> None:
        observer = out.observer
        if observer is None:
            return
        for op in step.ops:
            array = step.output(out, op) if observer.wants_output(op) else None
            if array is not None:

                def report(op: Op = op, array: np.ndarray = array) -> None:
                    observer.on_output(op, array)

                out.call(report)

    def _take(self, key: tuple) -> PassProgram | None:
        """A kept pass that no other thread runs, or None."""
        with self._lock:
            passes = self._passes.get(key)
            return passes.pop() if passes else None

    def _keep(self, key: tuple, current: PassProgram) -> None:
        if current.nbytes() + current.inner_pool.nbytes > CACHED_BYTES:
            current.release()
            return
        with self._lock:
            self._passes.setdefault(key, []).append(current)
            self._passes.move_to_end(key)
            while len(self._passes) > _CACHED_PASSES:
                for former in self._passes.popitem(last=False)[1]:
                    former.release()


def tail_start(steps: Sequence[Step], result: Value) -> int:
    """The number of the first step of the end of a graph in which every token is computed by itself; as many as there are steps
    where the result is not of that end."""
    start = max((number + 1 for number, step in enumerate(steps) if not BY_TOKEN.issuperset(map(type, step.ops))), default=0)
    made = {value.index for step in steps[start:] for op in step.ops for value in op.outputs}
    return start if result.index in made else len(steps)


def values_from_before(steps: Sequence[Step], start: int) -> list[Value]:
    """What steps from `start` on read and earlier ones, or none, have made."""
    own = {value.index for step in steps[start:] for op in step.ops for value in op.outputs}
    read = (value for step in steps[start:] for op in step.ops for value in op.inputs)
    return list({value.index: value for value in read if value.index not in own}.values())


def _shares(steps: Sequence[Step]) -> list[float]:
    """Of a pass, what is done after each of its steps: by the weights that these multiply, at least 1 each."""
    reached = list(accumulate(1 + sum(op.multiplied for op in step.ops) for step in steps))
    return [each / reached[-1] for each in reached]
