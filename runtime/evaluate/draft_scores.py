"""Scores of a model's draft layers: how well each predicts the text, and how often the model would accept its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import numpy as np

from ...data_classes import dataclass
from ..draft_head import window_rows
from ..model import Model
from .divergence import BLOCK_BYTES


@dataclass(frozen=True)
class DraftFigures:
    """How well one draft layer predicts. Layer d = 0, 1, ... predicts d + 2 tokens ahead, from the text as far as it reaches.

    perplexity      on these tokens
    top1_agreement  percent of predictions with the same most probable token as the model's, which are accepted at temperature 0
    acceptance      mean probability that the model gives to its most probable token: the share accepted at temperature 1
    """

    perplexity: float
    top1_agreement: float
    acceptance: float


@dataclass(frozen=True)
class DraftPart:
    """Sums over a block of a draft layer's predictions.

    loss      in nats; agreeing: predictions with the same most probable token as the model's
    accepted  probabilities that the model gives to the draft layer's most probable tokens
    """

    depth: int
    count: int
    loss: float
    agreeing: int
    accepted: float


class DraftScores:
    """Sums over the windows scored so far, of each draft layer."""

    def __init__(self, model: Model):
        self.model = model
        self._sums: dict[int, np.ndarray] = {}

    def add(self, window: np.ndarray, hidden: np.ndarray) -> None:
        """Adds each layer's predictions of a window's second half: all of the same tokens.

        window: int [n], n at least twice the number of layers; hidden: float32 [n, n_embd] of the model."""
        for part in self.parts(window, hidden):
            self.join(part)

    def join(self, part: DraftPart) -> None:
        """Adds the sums of a block."""
        depth, *sums = astuple(part)
        self._sums[depth] = self._sums.get(depth, 0.0) + np.array(sums, np.float64)

    def parts(self, window: np.ndarray, hidden: np.ndarray) -> Iterator[DraftPart]:
        """What `add` adds, block by block."""
        step = max(1, BLOCK_BYTES // (8 * self.model.n_vocab))
        for depth, rows in enumerate(window_rows(self.model, window, hidden)):
            for first in range(len(window) // 2, len(window) - 1, step):
                block = slice(first, min(first + step, len(window) - 1))  # of the model's rows: row i predicts token i + 1
                own_first, own_last = block.start - depth - 1, block.stop - depth - 1
                drafts = self.model.draft_heads[depth].logits(rows[own_first:own_last]).astype(np.float64)
                own = self.model.head(hidden[block]).astype(np.float64)
                best, index = drafts.argmax(axis=1), np.arange(len(drafts))
                yield DraftPart(
                    depth,
                    len(drafts),
                    -float(_log_probability(drafts, index, window[block.start + 1 : block.stop + 1]).sum()),
                    int((best == own.argmax(axis=1)).sum()),
                    float(np.exp(_log_probability(own, index, best)).sum()),
                )

    def figures(self) -> list[DraftFigures]:
        """The figures of each draft layer, in order."""
        return [
            DraftFigures(float(np.exp(loss / count)), float(100 * agreeing / count), float(accepted / count))
            for _, (count, loss, agreeing, accepted) in sorted(self._sums.items())
        ]


def _log_probability(logits: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log probability of one token per row of logits, float64 [n]."""
    peak = logits.max(axis=1)
    return logits[index, tokens] - peak - np.log(np.exp(logits - peak[:, None]).sum(axis=1))
