"""Mixture of experts: a router picks a few experts per token; their outputs are added up with weights.

The variants (softmax or sigmoid scores, a bias that only sways the choice, choice limited to the best groups, weights made to
sum to one, a final scale) are those of DeepSeek-V2 (arXiv:2405.04434, section 2.2) and V3 (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .feedforward import GatedFeedForward
from .kernels.elementwise import add_part, add_rows, launch, route, share
from .kernels.experts import RUN, arrange, combine_part
from .kernels.gemm.gemm import room
from .kernels.gemv.gemv import FIRST, MATRIX, TARGET, TOKENS
from .kernels.products import FEW
from .weights import Linear

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func in GGUF
_NO_BIAS = np.zeros(0, np.float32)
_FEW = 4  # tokens of an expert up to which, among many, its products are made as if they were all
_TOGETHER = 64 << 20  # bytes of results in between: experts of a batch are done some after others, so many at a time
_ROUTED = 128  # tokens whose experts one thread chooses at a time


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights.

    offset                float32 [experts] or None: added to what the linear gives, before anything else
    bias                  float32 [experts] or None: added to the scores for the choice only
    groups, groups_used   experts come in `groups` equal runs; only those of the best `groups_used` can be chosen. A group
                          counts by its best score (V2: softmax) or by the sum of its best two (V3: sigmoid)
    normalise, scale      weights are divided by their sum, then multiplied by scale
    """

    linear: Linear
    used: int
    gating: int = SOFTMAX
    bias: np.ndarray | None = None
    groups: int = 1
    groups_used: int = 1
    normalise: bool = False
    scale: float = 1.0
    offset: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 [n, n_embd] -> experts int [n, used], weights float32 [n, used]; best first, of equals the lower number."""
        scores = self.linear.matmul(x)
        if self.offset is not None:
            scores += self.offset
        experts = np.empty((len(x), self.used), np.int64)
        weights = np.empty((len(x), self.used), np.float32)
        bias = _NO_BIAS if self.bias is None else self.bias
        sigmoid, used = self.gating == SIGMOID, self.groups_used

        def choose(a: int) -> None:
            b = a + _ROUTED
            route(scores[a:b], sigmoid, bias, self.groups, used, self.normalise, float(self.scale), experts[a:b], weights[a:b])

        self.linear.store.workers.map(choose, range(0, len(x), _ROUTED))
        return experts, weights


def reduced(experts: np.ndarray, weights: np.ndarray, least: int, share: float, normalise: bool) -> np.ndarray:
    """Experts [n, used], best first, without those behind the first `least` that weigh less than share times the strongest.

    A dropped expert becomes -1 and its weight 0; with normalise the others' weights grow so that their sum stays.
    """
    dropped = weights < np.float32(share) * weights.max(axis=1, keepdims=True)
    dropped[:, :least] = False
    before = weights.sum(axis=1, keepdims=True)
    weights[dropped] = 0
    if normalise:
        weights *= before / np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-20))
    return np.where(dropped, -1, experts)


class GatedShare:
    """A shared block whose outputs are multiplied by sigmoid(x . gate), a number per token (Qwen 1.5 and 2 MoE)."""

    def __init__(self, gate: np.ndarray, block: Callable[[np.ndarray], np.ndarray]):
        self.gate, self.block = np.ascontiguousarray(gate, np.float32), block

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        out = self.block(x)
        share(np.ascontiguousarray(x), self.gate, out)
        return out


class _Rows:
    """Rows for what the tokens of a batch chose, expert by expert (see kernels.experts.arrange)."""

    def __init__(self, chosen: np.ndarray, weights: np.ndarray, experts: GatedFeedForward, few: int):
        count, self.unit, self._experts = experts.gate.matrices, experts.unit, experts
        most = chosen.size + count * self.unit
        self.starts, self.counts, self.places, self.matrices = (np.empty(n, np.int64) for n in (count, count, most, most))
        self._rows, self._factors = np.empty(chosen.shape, np.int64), np.empty(chosen.shape, np.float32)
        results = self.starts, self.counts, self.places, self.matrices, self._rows, self._factors
        self.fresh = False  # whether what the next results are added to is to be zero before
        self.many, self.rest = arrange(chosen, weights, count, self.unit, few, *results)

    def jobs(self, some: np.ndarray, low: int) -> np.ndarray:
        """int64 [some, 4] as for a Gemv: the rows of some experts, counted from row `low` on."""
        jobs = np.empty((len(some), 4), np.int64)
        jobs[:, MATRIX], jobs[:, TOKENS] = some, self.counts[some]
        jobs[:, FIRST] = jobs[:, TARGET] = self.starts[some] - low
        return jobs

    def together(self, some: np.ndarray, most: int) -> Iterator[np.ndarray]:
        """Cuts a list of experts into runs of as many as have together no more than so many rows (one at least)."""
        while len(some):
            ends = self.starts[some] + self.counts[some] - self.starts[some[0]]
            stop = max(1, int(np.searchsorted(ends, most, "right")))
            yield some[:stop]
            some = some[stop:]

    def span(self, some: np.ndarray) -> tuple[int, int]:
        """The rows of experts that follow each other, from ... to, in whole units."""
        low, end = int(self.starts[some[0]]), int(self.starts[some[-1]] + self.counts[some[-1]])
        return low, low + -(-(end - low) // self.unit) * self.unit

    def combine(self, results: np.ndarray, low: int, out: np.ndarray) -> None:
        """Adds results float32 [rows, n_embd], those of the rows from `low` on, to their tokens in out [n, n_embd]."""
        (n, columns), used, bias = out.shape, self._factors.size // len(out), self._experts.bias.get("down")
        table = np.empty(13, np.int64)
        table[:4] = [array.ctypes.data for array in (results, self._factors, self._rows, out)]
        step = max(1, RUN // (columns * used))
        table[4:8], table[8] = (n, used, columns, step), 0 if bias is None else bias.ctypes.data
        table[9:] = self.matrices.ctypes.data, low, low + len(results), self.fresh
        self.fresh = False
        launch(self._experts.gate.store.workers.ready(), combine_part.address, table, -(-n // step))


class MixtureOfExperts:
    """router -> experts (a stack, each computing the tokens that chose it) + a shared block that sees every token."""

    def __init__(self, router: Router, experts: GatedFeedForward, shared: Callable[[np.ndarray], np.ndarray] | None = None):
        self.router, self.experts, self.shared = router, experts, shared
        self.reduction: tuple[int, float] | None = None  # see `reduced`

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        chosen, weights = self.router(x)
        if self.reduction is not None:
            chosen = reduced(chosen, weights, *self.reduction, self.router.normalise)
        experts, out = self.experts, self.shared(x) if self.shared is not None else None
        if len(x) > FEW and experts.many is not None and not experts.gate.store.watch:
            return self._add_many(np.ascontiguousarray(x, np.float32), chosen, weights, out)
        out = np.zeros_like(x) if out is None else out
        order = np.argsort(chosen, axis=None, kind="stable")  # (token, choice) pairs, expert by expert
        order = order[np.count_nonzero(chosen < 0) :]  # those that were dropped come first
        tokens, factors, matrices = order // chosen.shape[1], weights.reshape(-1)[order], chosen.reshape(-1)[order]
        if len(x) > FEW or not self._add_few(x, tokens, factors, matrices, out):
            self._add_each(x, tokens, factors, matrices, out)
        return out

    def _add_few(self, x: np.ndarray, tokens: np.ndarray, factors: np.ndarray, matrices: np.ndarray, out: np.ndarray) -> bool:
        """All experts' products at once. False, and nothing done, where that cannot be."""
        if len(x) == 1:  # every expert has one token, the same
            jobs = np.zeros((2, len(matrices), 4), np.int64)
            jobs[:, :, MATRIX], jobs[:, :, TOKENS] = matrices, 1
            jobs[0, :, TARGET] = jobs[1, :, FIRST] = jobs[1, :, TARGET] = np.arange(len(matrices))
        else:
            present, starts, counts = np.unique(matrices, return_index=True, return_counts=True)
            jobs = np.empty((2, len(present), 4), np.int64)
            jobs[:, :, MATRIX], jobs[:, :, FIRST], jobs[:, :, TOKENS], jobs[:, :, TARGET] = present, starts, counts, starts
            x = x[tokens]
        results = self.experts.for_few(x, jobs, matrices)
        if results is None:
            return False
        add_rows(0, add_part.address, results, factors, tokens, out)
        return True

    def _add_many(self, x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Experts of many tokens as programs for the threads' team, and those of a few tokens among them as in `_add_few`.

        out: what the results are added to, if anything. Returns the sum, float32 [n, n_embd].
        """
        experts, store = self.experts, self.experts.gate.store
        few = _FEW if experts.few_at_once and store.observer is None else 0
        rows = _Rows(chosen, weights, experts, few)
        rows.fresh, out = out is None, np.empty_like(x) if out is None else out
        if rows.rest:
            low, end = rows.many, rows.many + rows.rest
            jobs = np.stack([rows.jobs(np.flatnonzero((rows.counts > 0) & (rows.counts <= few)), low)] * 2)
            results = experts.for_few(x[rows.places[low:end]], jobs, rows.matrices[low:end], biased=False)
            assert results is not None
            rows.combine(results, low, out)
        for some in rows.together(np.flatnonzero(rows.counts > few), _TOGETHER // (4 * max(2 * experts.gate.rows, x.shape[1]))):
            low, end = rows.span(some)
            results = room("results", (end - low, x.shape[1]))
            starts, counts = rows.starts[some], rows.counts[some]
            self._tell((experts.gate, experts.up), x, some, starts, counts, rows.places)
            given = x, rows.jobs(some, low), results, rows.places[low:end], rows.matrices[low:end]
            for values in experts.for_many(*given):
                self._tell((experts.down,), values, some, starts - low, counts)
            rows.combine(results, low, out)
        return out

    def _tell(
        self,
        stacks: Sequence[Linear],
        x: np.ndarray,
        some: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        places: np.ndarray | None = None,
    ) -> None:
        """Tells the observer, if there is one, what experts multiply: counts rows from starts on, of x or of x[places]."""
        store = self.experts.gate.store
        add_runs = getattr(store.observer, "add_runs", None)
        if add_runs is not None:
            add_runs([stack.name for stack in stacks], x, some, starts, counts, places)
        elif store.observer is not None:

            def tell(run: tuple[int, int, int]) -> None:
                expert, first, count = run
                inputs = x[first : first + count] if places is None else x[places[first : first + count]]
                for stack in stacks:
                    stack.observe(inputs, expert)

            store.workers.map(tell, list(zip(some.tolist(), starts.tolist(), counts.tolist(), strict=True)))

    def _add_each(self, x: np.ndarray, tokens: np.ndarray, factors: np.ndarray, matrices: np.ndarray, out: np.ndarray) -> None:
        experts, workers = self.experts, self.experts.gate.store.workers
        present, starts = np.unique(matrices, return_index=True)
        runs = list(zip(present.tolist(), starts.tolist(), [*starts[1:].tolist(), len(matrices)], strict=True))

        def compute(run: tuple[int, int, int]) -> np.ndarray:
            expert, a, b = run
            return experts(x[tokens[a:b]], expert)

        per_row = 3 * experts.gate.columns * experts.gate.rows
        together = 4 * workers.count  # enough to keep all busy; the results of hundreds of experts would take much memory
        for at in range(0, len(runs), together):
            some = runs[at : at + together]
            results = workers.map(compute, some, (some[-1][2] - some[0][1]) * per_row)
            for (_, a, b), result in zip(some, results, strict=True):  # in order, so that sums come out the same every time
                add_rows(workers.ready(), add_part.address, result, factors[a:b], tokens[a:b], out)
