"""Scores of a model's first draft layer: how well it predicts the text, and how often the model would accept its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..draft_head import window_rows
from ..model import Model
from .divergence import BLOCK_BYTES


@dataclass(frozen=True)
class DraftPart:
    """Sums over a block of predictions; see `DraftScores`."""

    count: int
    loss: float
    agreeing: int
    accepted: float


@dataclass
class DraftScores:
    """Sums over the windows scored so far.

    loss      of the tokens after the next, in nats; agreeing: predictions with the same most probable token as the model's
    accepted  probabilities that the model gives to the draft layer's most probable tokens
    """

    model: Model
    count: int = 0
    loss: float = 0.0
    agreeing: int = 0
    accepted: float = field(default=0.0)

    def add(self, window: np.ndarray, hidden: np.ndarray) -> None:
        """Adds the predictions of a window's second half. window: int [n]; hidden: float32 [n, n_embd] of the model."""
        for part in self.parts(window, hidden):
            self.join(part)

    def join(self, part: DraftPart) -> None:
        """Adds the sums of a block."""
        self.count += part.count
        self.loss += part.loss
        self.agreeing += part.agreeing
        self.accepted += part.accepted

    def parts(self, window: np.ndarray, hidden: np.ndarray) -> Iterator[DraftPart]:
        """What `add` adds, block by block."""
        [rows, *_] = window_rows(self.model, window, hidden)
        first, step = len(window) // 2 - 1, max(1, BLOCK_BYTES // (8 * self.model.n_vocab))
        for start in range(first, len(rows) - 1, step):
            block = slice(start, min(start + step, len(rows) - 1))  # row i predicts token i + 2
            drafts = self.model.draft_heads[0].logits(rows[block]).astype(np.float64)
            own = self.model.head(hidden[block.start + 1 : block.stop + 1]).astype(np.float64)
            best, index = drafts.argmax(axis=1), np.arange(len(drafts))
            targets = window[block.start + 2 : block.stop + 2]
            yield DraftPart(
                len(drafts),
                -float(_log_probability(drafts, index, targets).sum()),
                int((best == own.argmax(axis=1)).sum()),
                float(np.exp(_log_probability(own, index, best)).sum()),
            )

    def figures(self) -> dict[str, float]:
        """mtp_perplexity, mtp_top1_agreement in percent, mtp_acceptance as a share."""
        return {
            "mtp_perplexity": float(np.exp(self.loss / self.count)),
            "mtp_top1_agreement": 100 * self.agreeing / self.count,
            "mtp_acceptance": self.accepted / self.count,
        }


def _log_probability(logits: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of one token per row of logits, float64 [n]."""
    peak = logits.max(axis=1)
    return logits[index, tokens] - peak - np.log(np.exp(logits - peak[:, None]).sum(axis=1))
