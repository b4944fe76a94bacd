"""Mixture of experts: a router picks a few experts per token; their outputs are added up with weights.

The variants (softmax or sigmoid scores, a bias that only sways the choice, choice limited to the best groups, weights made to
sum to one, a final scale) are those of DeepSeek-V2 (arXiv:2405.04434, section 2.2) and V3 (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .feedforward import GatedFeedForward
from .weights import Linear

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func in GGUF


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights.

    bias                  float32 [experts] or None: added to the scores for the choice only
    groups, groups_used   experts come in `groups` equal runs; only those of the best `groups_used` can be chosen
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

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 [n, n_embd] -> experts int [n, used], weights float32 [n, used]."""
        scores = self.linear.matmul(x)
        if self.gating == SIGMOID:
            scores = 1 / (1 + np.exp(-scores))
        else:
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        choice = scores if self.bias is None else scores + self.bias
        if self.groups > 1:
            choice = self._limit_to_groups(choice)
        experts = np.argpartition(-choice, self.used - 1, axis=1)[:, : self.used]
        weights = np.take_along_axis(scores, experts, axis=1)
        if self.normalise:
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-20))
        if self.scale != 1:
            weights *= np.float32(self.scale)
        return experts, weights

    def _limit_to_groups(self, choice: np.ndarray) -> np.ndarray:
        """A group counts by its best score (V2: softmax) or by the sum of its best two (V3: sigmoid)."""
        grouped = choice.reshape(len(choice), self.groups, -1)
        if self.gating == SIGMOID and grouped.shape[2] > 1:
            strength = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)
        else:
            strength = grouped.max(axis=2)
        dropped = np.argpartition(-strength, self.groups_used - 1, axis=1)[:, self.groups_used :]
        limited = grouped.copy()
        np.put_along_axis(limited, dropped[:, :, None], -np.inf, axis=1)
        return limited.reshape(choice.shape)


class MixtureOfExperts:
    """router -> experts (a stack, each computing the tokens that chose it) + a shared block that sees every token."""

    def __init__(self, router: Router, experts: GatedFeedForward, shared: GatedFeedForward | None = None):
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_embd]."""
        experts, (chosen, weights) = self.experts, self.router(x)
        used = chosen.shape[1]
        order = np.argsort(chosen, axis=None, kind="stable")  # (token, choice) pairs, expert by expert
        tokens, factors = order // used, weights.reshape(-1, 1)[order]
        present, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
        runs = list(zip(present.tolist(), starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True))

        def compute(run: tuple[int, int, int]) -> np.ndarray:
            expert, a, b = run
            result = experts(x[tokens[a:b]], expert)
            result *= factors[a:b]
            return result

        out = self.shared(x) if self.shared is not None else np.zeros_like(x)
        workers, per_row = experts.gate.store.workers, 3 * experts.gate.columns * experts.gate.rows
        together = 4 * workers.count  # enough to keep all busy; the results of hundreds of experts would take much memory
        for at in range(0, len(runs), together):
            some = runs[at : at + together]
            results = workers.map(compute, some, (some[-1][2] - some[0][1]) * per_row)
            for (_, a, b), result in zip(some, results, strict=True):  # in order, so that sums come out the same every time
                out[tokens[a:b]] += result  # an expert has no token twice
        return out
