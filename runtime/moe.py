"""Mixture of experts: a router picks a few experts per token; their outputs are added up with weights.

The variants (softmax or sigmoid scores, a bias that only sways the choice, choice limited to the best groups, weights made to
sum to one, a final scale) are those of DeepSeek-V2 (arXiv:2405.04434, section 2.2) and V3 (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .feedforward import GatedFeedForward
from .kernels.gemv import FIRST, MATRIX, TARGET, TOKENS
from .kernels.products import FEW
from .kernels.small import add_part, add_rows, route
from .weights import Linear

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func in GGUF
_NO_BIAS = np.zeros(0, np.float32)


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
        route(scores, sigmoid, bias, self.groups, used, self.normalise, float(self.scale), experts, weights)
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
        self.gate, self.block = gate, block

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        out = self.block(x)
        out /= 1 + np.exp(-(x @ self.gate)[:, None])
        return out


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
        order = np.argsort(chosen, axis=None, kind="stable")  # (token, choice) pairs, expert by expert
        order = order[np.count_nonzero(chosen < 0) :]  # those that were dropped come first
        tokens, factors, matrices = order // chosen.shape[1], weights.reshape(-1)[order], chosen.reshape(-1)[order]
        out = self.shared(x) if self.shared is not None else np.zeros_like(x)
        if len(x) > FEW or not self._add_few(x, tokens, factors, matrices, out):
            self._add_many(x, tokens, factors, matrices, out)
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

    def _add_many(self, x: np.ndarray, tokens: np.ndarray, factors: np.ndarray, matrices: np.ndarray, out: np.ndarray) -> None:
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
